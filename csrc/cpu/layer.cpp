// Layers of a decode step in one call: what the schedules `resident` and `none` of ess/overlap say
// for a whole batch, by the same functions in the same order, so with the same bits.
//
// Python says once where everything lies (ess/engine/layers/direct.py) and hears how far the call
// came. It stops where only Python can go on, and goes on from there when it is called again:
//
//   absent    a selected row has no slot; `find` is to resolve it, from Part::find on
//   fetch     a row is on its way by a copy of another caller, or is read in place, or was never
//             written; when it is there, or named, from Part::attend on
//   refused   an id that is not there: no caller goes on
#include <algorithm>

#include "../residency/planner.h"
#include "kernels.h"
#include "keys.h"

namespace ess {

namespace {

enum class Find : int64_t { address, locate, resolve };
enum class Part : int64_t { front, select, find, ask, attend, back, done };
enum class Stop : int64_t { none, absent, fetch, refused };

constexpr int kParts = int(Part::done);

// What the layers of a step share. `lines` are the page table lines of the queries, `hits` grows by
// what each query finds at once where rows are resolved. Of layers that are done, together: what
// each part took, what it took to resolve, and how many rows were claimed and copied. Where there
// is an `ending`, it is run behind the last layer, and took `ending_ns`.
struct StepSide {
    const int32_t* table;
    int64_t table_width;
    int64_t table_stride;
    const int32_t* lengths;
    const int32_t* lines;
    const int32_t* row_ids;
    int64_t* hits;
    int64_t query_count;
    int64_t number;
    int64_t taken[kParts];
    int64_t planned_ns;
    int64_t claimed_total;
    const Stage* ending;
    const Bound* ending_sides;
    int64_t ending_ns;
};

// A layer that shares its rows with no other. Of `append`, `index` and `attend` the step fills in
// what it knows; `began` and `ended` are of each part, `copied` of the fetch.
struct Layer {
    const Stage* front;
    const Bound* front_sides;
    const Stage* ask;
    const Bound* ask_sides;
    const Stage* back;
    const Bound* back_sides;
    Append append;
    Index index;
    Attend attend;
    int64_t top_k;
    int32_t* selection;
    int32_t* located;
    Find find;
    Arena* arena;
    Split* split;
    Lookup* lookup;
    uint8_t* host;
    int64_t number;
    int64_t ticket;
    Part part;
    Stop stop;
    int64_t claimed;
    int64_t hit_total;
    int64_t evicted_count;
    int64_t copied[2];
    int64_t began[kParts];
    int64_t ended[kParts];
};

Stop front(Layer& layer, const StepSide& step, int32_t threads) {
    ess_stage(layer.front, layer.front_sides, step.query_count, threads);
    Append append = layer.append;
    append.row_ids = step.row_ids;
    append.count = step.query_count;
    return ess_append(&append) ? Stop::none : Stop::refused;
}

Stop select(Layer& layer, const StepSide& step, int32_t threads) {
    Index index = layer.index;
    index.query_count = step.query_count;
    index.table = step.table;
    index.table_width = step.table_width;
    index.table_stride = step.table_stride;
    index.lengths = step.lengths;
    int64_t span[2];
    const int32_t fault = ess_index_top_k(&index, layer.top_k, layer.selection, threads, span);
    return fault ? Stop::refused : Stop::none;
}

Stop resolve(Layer& layer, const StepSide& step) {
    Lookup& lookup = *layer.lookup;
    lookup.host = layer.host;
    layer.claimed = ess_resolve(layer.arena, layer.split, &lookup, layer.selection, step.lines,
                                step.lengths, step.query_count, layer.top_k, layer.number, 1,
                                step.number, layer.ticket);
    if (layer.claimed < 0) return Stop::refused;
    const Split& split = *layer.split;
    layer.hit_total = split.hit_total;
    layer.evicted_count = layer.arena->evicted_count;
    layer.copied[0] = lookup.times[0];
    layer.copied[1] = lookup.times[lookup.is_landed ? 1 : 0];
    for (int64_t i = 0; i < step.query_count; i++) step.hits[i] += split.hit_count[i];
    const bool waits = (layer.claimed && !lookup.is_landed) || split.late_ticket;
    return waits || split.place_total || lookup.unwritten_count ? Stop::fetch : Stop::none;
}

Stop find(Layer& layer, const StepSide& step) {
    if (layer.find == Find::resolve) return resolve(layer, step);
    const Lookup& lookup = *layer.lookup;
    if (layer.find == Find::address)
        return ess_translate(layer.selection, lookup.lines, step.lines, step.lengths, layer.located,
                             step.query_count, layer.top_k, lookup.line_count, lookup.page_max)
                   ? Stop::none
                   : Stop::refused;
    const int64_t absent = ess_locate(layer.arena, &lookup, layer.selection, step.lines,
                                      step.lengths, layer.located, step.query_count, layer.top_k);
    if (absent) return absent < 0 ? Stop::refused : Stop::absent;
    for (int64_t i = 0; i < step.query_count; i++)
        layer.hit_total += std::min<int64_t>(step.lengths[i], layer.top_k);
    return Stop::none;
}

Stop attend(Layer& layer, const StepSide& step, int32_t threads) {
    const bool resolved = layer.find == Find::resolve;
    Attend attend = layer.attend;
    attend.query_count = step.query_count;
    attend.slots = resolved ? layer.split->slots : layer.located;
    attend.slot_stride = resolved ? layer.split->width : layer.top_k;
    attend.slot_count = layer.top_k;
    int64_t span[2];
    return ess_attend(&attend, threads, span) ? Stop::refused : Stop::none;
}

Stop run_part(Part part, Layer& layer, const StepSide& step, int32_t threads) {
    switch (part) {
        case Part::front: return front(layer, step, threads);
        case Part::select: return select(layer, step, threads);
        case Part::find: return find(layer, step);
        case Part::attend: return attend(layer, step, threads);
        case Part::ask: ess_stage(layer.ask, layer.ask_sides, step.query_count, threads); break;
        default: ess_stage(layer.back, layer.back_sides, step.query_count, threads);
    }
    return Stop::none;
}

// From `part` to the end, or to the part behind the one that it stops in.
Stop run(Layer& layer, const StepSide& step, int32_t threads) {
    layer.stop = Stop::none;
    while (layer.part != Part::done && layer.stop == Stop::none) {
        const int at = int(layer.part);
        layer.began[at] = now_ns();
        layer.stop = run_part(layer.part, layer, step, threads);
        layer.ended[at] = now_ns();
        layer.part = Part(at + 1);
    }
    return layer.stop;
}

void count(const Layer& layer, StepSide& step) {
    for (int part = 0; part < kParts; part++)
        step.taken[part] += layer.ended[part] - layer.began[part];
    const int find = int(Part::find);
    if (layer.find == Find::resolve) step.planned_ns += layer.ended[find] - layer.began[find];
    step.claimed_total += layer.claimed;
}

void begin(StepSide& step) {
    std::fill_n(step.hits, step.query_count, 0);
    std::fill_n(step.taken, kParts, 0);
    step.planned_ns = step.claimed_total = step.ending_ns = 0;
}

void end(StepSide& step, int32_t threads) {
    if (!step.ending) return;
    const int64_t began_ns = now_ns();
    ess_stage(step.ending, step.ending_sides, step.query_count, threads);
    step.ending_ns = now_ns() - began_ns;
}

void begin(Layer& layer) {
    layer.part = Part::front;
    layer.claimed = layer.hit_total = layer.evicted_count = 0;
    layer.copied[0] = layer.copied[1] = 0;
}

}  // namespace

}  // namespace ess

// How many layers are done: all, or the next one says in `stop` why it is not. `begins`: the call
// is the step's first for these layers, and forgets what they did in another.
ESS_EXPORT int64_t ess_layers(ess::Layer* layers, ess::StepSide* step, int64_t count,
                              int32_t threads, int32_t begins) {
    if (begins) {
        ess::begin(*step);
        for (int64_t i = 0; i < count; i++) ess::begin(layers[i]);
    }
    for (int64_t i = 0; i < count; i++) {
        if (ess::run(layers[i], *step, threads) != ess::Stop::none) return i;
        ess::count(layers[i], *step);
    }
    ess::end(*step, threads);
    return count;
}
