// The end of a step, in all groups that have claimed slots for its new rows: those that are not
// kept leave, those that are kept are listed for their copy to the host, index keys are laid side
// by side for theirs, lengths grow, and what the step's calls have reported is counted.
//
// A block takes 64 new rows of one group. A row is kept if so few rows of its sequence come before
// it in the step as were accepted, and if its group is stored at all. The rows of a step are
// distinct, and so are their slots within a group and between groups: no two threads write the same
// word. Counts of a group are added atomically, once a block; the group's first block adds up its
// reports, and the first block of all the lengths, which no other block reads.
//
// Lists have an entry for every new row and layer; what is left out is -1. A row that has found no
// slot is left out of all of them.
#include "resolve.cuh"

namespace {

constexpr i32 kNumbers = sizeof(Report) / sizeof(i32);
static_assert(kThreads >= kPageRows && kThreads >= kNumbers, "one turn for rows and for numbers");

// A block's rows; the slots of those that are kept, -1 for the others.
struct Tile {
    i32 row[kPageRows];
    i32 slot[kPageRows];
};

struct Seal {
    i32 *slot_of, *row_of;
    u16* rank_of;
    u8* dirty;
    i32* lengths;
    const i32* host_page_of;
    const i32 *accepted, *lines, *sequence_of, *offsets, *rows, *new_slots;
    const i32* first_layer;
    const u32* key_pages;
    i32 *kept, *sources, *targets, *told;
    u32* keys;
    const i32 *selects, *writes;
    u64 *selected, *written, *left, *stored;
    i64 row_id_count, slot_stride, host_row_count, layers_each, page_count, key_words, value_words;
    i64 group_total, select_count, number_stride;
    i64 count, sequence_count, tiles, group_first, group_stop, stored_first, stored_stop;

    __device__ bool is_stored(i32 group) const {
        return group >= stored_first && group < stored_stop;
    }

    // Lengths, and the host is told what they have grown by.
    __device__ void grow() const {
        for (i32 i = threadIdx.x; i < sequence_count; i += kThreads) {
            lengths[lines[i]] += accepted[i];
            told[i] = accepted[i];
        }
    }

    // What the calls of the step have said of this group, by those that select and that write.
    __device__ void add_reports(i32 group) const {
        const i32 number = threadIdx.x;
        if (number >= kNumbers) return;
        i64 sum = 0;
        for (i64 call = 0; call < select_count; call++)
            sum += selects[(call * group_total + group) * kNumbers + number];
        selected[group * number_stride + number] += sum;
        written[group * number_stride + number] += i64(writes[group * kNumbers + number]);
    }

    // Rows that are not kept leave their slots; `tile` has what the lists need.
    __device__ void leave(i32 group, i32 first, Tile& tile) const {
        const i32 i = threadIdx.x, at = first + i;
        const bool is_new = i < kPageRows && at < count;
        const bool keeps = is_new && is_stored(group) && accepted[sequence_of[at]] > offsets[at];
        if (is_new) {
            const i32 row = rows[at], slot = new_slots[group * slot_stride + at];
            slot_of[group * row_id_count + row] = keeps ? slot : -1;
            if (rank_of != nullptr && !keeps) rank_of[group * row_id_count + row] = 0;
            if (slot >= 0) {
                row_of[slot] = keeps ? row : -1;
                dirty[slot] = keeps;
            }
            tile.row[i] = row;
            tile.slot[i] = keeps ? slot : -1;
        }
        const i32 stays = __syncthreads_count(keeps);
        const i32 leaves = __syncthreads_count(is_new && !keeps);
        if (threadIdx.x != 0) return;
        atomicAdd(&stored[group * number_stride], u64(stays));
        atomicAdd(&left[group * number_stride], u64(leaves));
    }

    // Where the kept rows are in the slab and go to on the host, in each layer of the group, and
    // the slots that are as old as their host when they are there. Rows on the host are numbered
    // anew from every layers_each-th layer on, since 31 bits do not name those of all.
    __device__ void list_rows(i32 group, i32 first, i32 here, const Tile& tile) const {
        const i32 begin = first_layer[group], layers = first_layer[group + 1] - begin;
        const i64 listed = begin - first_layer[stored_first];
        for (i32 i = threadIdx.x; i < layers * kPageRows; i += kThreads) {
            const i32 member = i / kPageRows, j = i % kPageRows;
            if (j >= here) continue;
            const i32 row = tile.row[j], slot = tile.slot[j];
            const i64 host_row = host_page_of[row / kPageRows] * i64(kPageRows) + row % kPageRows;
            const i64 at = (listed + member) * count + first + j;
            sources[at] = slot < 0 ? -1 : slot + member * kPageRows;
            const u32 layer = u32(begin + member) % u32(layers_each);
            targets[at] = slot < 0 ? -1 : i32(layer * host_row_count + host_row);
            if (member == 0) kept[(group - stored_first) * count + first + j] = slot;
        }
    }

    // From pages, which have 64 keys' values and then their scales.
    __device__ void copy_keys(i32 group, i32 first, i32 here, const Tile& tile) const {
        const i32 width = i32(key_words), values = i32(value_words), scales = width - values;
        u32* to = keys + (group * count + first) * key_words;
        for (i32 i = threadIdx.x; i < here * width; i += kThreads) {
            const i32 row = tile.row[i / width], word = i % width, offset = row % kPageRows;
            const i64 page = group * page_count + row / kPageRows;
            const i32 at = word < values ? offset * values + word
                                         : kPageRows * values + offset * scales + word - values;
            to[i] = key_pages[page * kPageRows * width + at];
        }
    }
};

}  // namespace

ESS_KERNEL __launch_bounds__(kThreads) ess_seal(const __grid_constant__ Seal call) {
    ESS_SHARED Tile tile;
    const i32 group = i32(call.group_first + blockIdx.x / call.tiles);
    const i32 first = i32(blockIdx.x % call.tiles) * kPageRows;
    const i32 here = i32(call.count) - first < kPageRows ? i32(call.count) - first : kPageRows;
    if (blockIdx.x == 0) call.grow();
    if (group >= call.group_stop) return;
    if (first == 0) call.add_reports(group);
    call.leave(group, first, tile);
    if (call.stored_first == call.stored_stop) return;
    if (call.is_stored(group)) call.list_rows(group, first, here, tile);
    call.copy_keys(group, first, here, tile);
}
