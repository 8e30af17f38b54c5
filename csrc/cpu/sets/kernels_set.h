// The kernels of one instruction set: its numbers are defined by the file that includes this one.
// Every header from elsewhere comes before the target changes, so that nothing shared is compiled
// for it.
#include <math.h>

#include <initializer_list>

#include "../codec.h"
#include "../encoding.h"
#include "../kernels.h"

#ifndef ESS_TILES
#define ESS_TILES 0
#endif

#ifdef ESS_TARGET
#define ESS_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define ESS_BEGIN(set) \
    ESS_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
ESS_BEGIN(ESS_TARGET)
#else
#pragma GCC push_options
#define ESS_BEGIN(set) ESS_PRAGMA(GCC target(set))
ESS_BEGIN(ESS_TARGET)
#endif
#endif

namespace ess {
namespace {
namespace ESS_SET {

#include "tile.h"

#include "powers.h"

#include "../ops/attend_rows.h"
#if ESS_TILES
#include "tiles.h"

#include "../ops/attend_tiles.h"
#endif
#include "../ops/attend.h"
#include "../ops/index.h"
#include "../ops/product.h"

#include "../ops/codes.h"
#if !ESS_TILES
#include "../ops/merge.h"
#include "../ops/stage.h"
#include "../ops/topk.h"

#if ESS_HALF
#include "../ops/screen.h"
constexpr auto kSelect = &select;
#else
constexpr decltype(Kernels::select) kSelect = nullptr;
#endif
#endif

}  // namespace ESS_SET
}  // namespace

#if ESS_TILES
void attend_in_tiles(const Attend& call, int64_t query, int64_t first_head, int64_t last_head) {
    ESS_SET::attend(call, query, first_head, last_head);
}

void index_in_tiles(const Index& call, const Run& run, int64_t first, int64_t last, float* logits,
                    int64_t stride) {
    ESS_SET::index(call, run, first, last, logits, stride);
}

void product_in_tiles(const Product& product, int64_t tokens) { ESS_SET::product(product, tokens); }

void coded_in_tiles(const Coded& coded, int64_t tokens, int64_t bits) {
    ESS_SET::coded_product(coded, tokens, bits);
}
#else
#define ESS_JOIN(a, b) a##b
#define ESS_TABLE(set) ESS_JOIN(kernels_, set)
#define ESS_TEXT(set) ESS_STRING(set)
#define ESS_STRING(set) #set
const Kernels ESS_TABLE(ESS_SET) = {ESS_TEXT(ESS_SET), ESS_SET::attend, ESS_SET::index,
                                    ESS_SET::top_k, ESS_SET::kSelect, ESS_SET::merge,
                                    ESS_SET::stage, ESS_SET::pack_panels, ESS_SET::pack_codes,
                                    ESS_LANES};
#endif

}  // namespace ess

#ifdef ESS_TARGET
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
