// The compute kernels: what a call is, and one table of functions per instruction set.
//
// The same sources (those that kernels_set.h includes) are compiled once for each set, in
// kernels_<set>.cpp; they hold nothing but internal names, so that no function made for a wide set
// can be linked in place of a narrow one. The ctypes twins are in ess/kernels/cpu/records.py.
//
// Nothing here depends on the number of threads: a piece of work is computed alike in any
// thread and beside any other piece.
#pragma once

#include "native.h"

namespace ess {

enum Form : int64_t { fp8 = 0, bf16 = 1, f32 = 2, fp8_64 = 3 };
constexpr int64_t kByteScaled = 64;  // values of fp8_64 that share a scale

// Rows of bytes, any distance apart.
struct Matrix {
    const uint8_t* base;
    int64_t stride;
    int64_t count;
};

// Sparse attention. A slot s >= 0 is row s of `rows`, s <= -2 is row -2 - s of `placed`, -1 is
// no row. Queries [query, head, latent + rope] are f32 or bf16, dense along the last axis.
struct Attend {
    int64_t query_count;
    int64_t head_count;
    int64_t latent_dim;
    int64_t rope_dim;
    int64_t row_form;
    int64_t query_form;
    int64_t query_stride;
    int64_t head_stride;
    int64_t slot_count;
    int64_t slot_stride;
    int64_t plain_dim;  // of the latent part, in fp8_64
    Matrix rows;
    Matrix placed;
    const uint8_t* queries;
    const int32_t* slots;
    float* out;  // [query, head, latent], dense
    float* lse;  // [query, head], dense
    float scale;
};

constexpr int64_t kPageKeys = 64;

// Index logits. Pages hold 64 keys, then (fp8) 64 scales.
struct Index {
    int64_t query_count;
    int64_t head_count;
    int64_t key_dim;
    int64_t key_form;
    int64_t query_form;
    int64_t query_stride;
    int64_t head_stride;
    int64_t table_width;
    int64_t table_stride;
    Matrix pages;
    const uint8_t* queries;
    const float* weights;  // [query, head], dense
    const int32_t* table;
    const int32_t* lengths;
};

// Whether products are taken in bf16 by sets that have them: both sides fit.
inline bool is_half(const Index& call) {
    return call.key_form == Form::fp8 && call.query_form != Form::f32;
}

// Consecutive queries that read the same pages, each as far as it reaches; `longest` reaches all.
struct Run {
    int64_t first;
    int64_t count;
    int64_t longest;
};

struct Merge {
    int64_t count;
    int64_t dim;
    const float* out[2];
    const float* lse[2];
    float* into_out;
    float* into_lse;
};

// One thing that a stage does to every token; stage.h says what, ess/kernels/cpu/stage.py how it is
// asked for. Dims and distances are in values.
enum class OpKind : int64_t {
    load, store, copy, add, norm, center, linear, rotate, hadamard, gate, experts, encode
};

struct Op {
    OpKind kind;
    int64_t from, to;
    int64_t from_at, to_at;
    int64_t in_dim, out_dim;
    int64_t count, from_step, to_step;  // heads, and how far apart they are
    int64_t half;
    int64_t bits;  // of the codes that weights are kept as; 0: words
    const void* weight;
    const void* more;
    float value;
};

// A product of matrices: tokens as words, weights as panels (product.h), floats out.
struct Product {
    const uint32_t* words;  // [token, steps]
    const uint32_t* panels;
    int64_t steps;
    int64_t out_dim;
    float* out;  // [token, stride]
    int64_t stride;
    float factor;
};

// The same with weights that stay codes (codes.h).
struct Coded {
    Product product;      // `steps` counts words of the input
    const float* inputs;  // sums of inputs [token, group]
    uint32_t* room;       // for codes that are written out
    int64_t groups;
};

struct Experts {
    int64_t expert_count, group_count, groups_kept, per_token, is_normed, inner, logits;
    const float* correction;
    const void* gate_up;
    const void* down;
    float scale;
};

struct Stage {
    const Op* ops;
    int64_t op_count;
    const int64_t* widths;  // of the registers
    int64_t register_count;
};

// The caller's memory for one token after another.
struct Bound {
    uint8_t* base;
    int64_t stride;
    int64_t form;
};

constexpr int64_t kStageTokens = 64;
constexpr int64_t kRegistersMax = 16;
constexpr int64_t kExpertsMax = 512;

struct Kernels {
    const char* name;
    void (*attend)(const Attend& call, int64_t query, int64_t first_head, int64_t last_head);
    // Logits of pages first .. last - 1 for every query of a run; rows of `stride` floats, of which
    // those behind a query's length are left alone.
    void (*index)(const Index& call, const Run& run, int64_t first, int64_t last, float* logits,
                  int64_t stride);
    void (*top_k)(const float* logits, int64_t count, int64_t k, int32_t* out);
    // The top-k of every query of a run at once, [query, k]; null where the set has nothing better
    // than `index` and `top_k`. Keys have a multiple of 64 values, at most 256.
    void (*select)(const Index& call, const Run& run, int64_t k, int32_t* out);
    void (*merge)(const Merge& call);
    // Tokens first .. last - 1, at most kStageTokens.
    void (*stage)(const Stage& stage, const Bound* bound, int64_t first, int64_t last);
    void (*pack_panels)(const uint8_t* from, int64_t form, int64_t out_dim, int64_t in_dim,
                        bool half, uint32_t* to);
    void (*pack_codes)(const uint8_t* codes, const uint16_t* steps, int64_t bits, int64_t out_dim,
                       int64_t in_dim, uint32_t* to);
    int64_t lanes;
};

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512, kernels_avx512_bf16;

// What avx512_bf16 leaves to tile registers, where there are any: products of bf16 whose sums are
// whole tiles of words long. Reads words of as many tokens as make whole tiles.
constexpr int64_t kTileRows = 16, kTileWords = 16;
inline bool in_tiles(int64_t words) { return words % kTileWords == 0 && has_tiles(); }
void attend_in_tiles(const Attend& call, int64_t query, int64_t first_head, int64_t last_head);
void index_in_tiles(const Index& call, const Run& run, int64_t first, int64_t last, float* logits,
                    int64_t stride);
void product_in_tiles(const Product& product, int64_t tokens);
void coded_in_tiles(const Coded& coded, int64_t tokens, int64_t bits);

// Those of the widest set that this machine has and ESS_ISA allows.
const Kernels& kernels();

// Memory of this thread, 64-byte aligned, kept for the next call. Each use has its own.
enum class Use { attend, index, select, screen, logits, stage, count };
void* scratch(Use use, int64_t bytes);

}  // namespace ess

// Calls of Python's that ess_layers makes too.
ESS_EXPORT int32_t ess_attend(const ess::Attend* call, int32_t threads, int64_t* span);
ESS_EXPORT int32_t ess_index_top_k(const ess::Index* call, int64_t k, int32_t* out,
                                   int32_t threads, int64_t* span);
ESS_EXPORT void ess_stage(const ess::Stage* stage, const ess::Bound* bound, int64_t tokens,
                          int32_t threads);
