// What a plan is written into and what it reads, as ess/pool/lru/planner.py binds them, and the
// calls that other native code makes too.
#pragma once

#include "arena.h"

namespace ess {

struct Split {
    int32_t* slots;
    int32_t* hit;
    int32_t* miss;
    int32_t* place;
    int32_t* hit_count;
    int32_t* miss_count;
    int32_t* place_count;
    int32_t* claimed;
    int32_t* pending;
    int64_t width;
    int64_t entry_count;
    int64_t hit_total;
    int64_t place_total;
    int64_t late_ticket;

    int32_t* claimed_slots() const { return claimed; }
    int32_t* claimed_rows() const { return claimed + entry_count; }
};

// Where positions lead: through page tables to row ids, from there to host rows and to the bits
// that say which of these were stored, one mask of pages per layer; and the memory of both ends:
// row r of a layer on the host, slot s of a group's j-th layer at row s + 64 j of the slab.
struct Lookup {
    const int32_t* lines;
    const int32_t* host_page_of;
    const uint64_t* stored;
    int32_t* rows;
    int32_t* host_rows;
    uint8_t* host;
    uint8_t* slab;
    int64_t* times;
    int64_t line_count;
    int64_t page_max;
    int64_t host_page_count;
    int64_t slab_count;
    int64_t row_bytes;
    int64_t at_once_bytes;
    int64_t unwritten_count;
    int64_t is_landed;
};

}  // namespace ess

ESS_EXPORT int64_t ess_translate(const int32_t* selection, const int32_t* page_table,
                                 const int32_t* table_row, const int32_t* length, int32_t* out,
                                 int64_t queries, int64_t width, int64_t tables, int64_t pages);
ESS_EXPORT int64_t ess_resolve(ess::Arena* arena, ess::Split* split, ess::Lookup* in,
                               const int32_t* selection, const int32_t* line_of,
                               const int32_t* length, int64_t queries, int64_t width,
                               int64_t first_layer, int64_t layers, int64_t step, int64_t ticket);
ESS_EXPORT int64_t ess_locate(const ess::Arena* arena, const ess::Lookup* in,
                              const int32_t* selection, const int32_t* line_of,
                              const int32_t* length, int32_t* slots, int64_t queries,
                              int64_t width);
