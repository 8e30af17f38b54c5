// Finds two touches of one word, one of them a write, that nothing orders: neither the order of a
// stream, nor an event that a stream or the host has waited for, nor an edge of a graph.
//
// Every piece of work has an actor, which is a stream or the host, and a number among the works of
// its actor. An actor's clock says how much of each other one's work is known to be over. So an
// earlier touch comes before this one exactly if the clock covers its number, however this run was
// scheduled. A word remembers the work that wrote it last, and the works that have read it since
// and do not follow one another.
#include "races.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace races {

bool on = false;

namespace {

typedef uintptr_t Address;
constexpr int kReaders = 3;
constexpr size_t kWord = 4, kPageWords = 1024, kTold = 64;

struct Work {
    int actor, name;
    uint32_t number;
};

// Numbers of works; 0 is none.
struct Word {
    uint32_t writer, readers[kReaders];
};

struct Page {
    Word words[kPageWords];
};

struct State {
    Clock clocks[kActors] = {};
    std::string actors[kActors];
    std::vector<int> free;
    int actor_count = 0;
    std::vector<Work> works{{0, 0, 0}};
    std::vector<std::string> names;
    std::map<std::string, int> name_of;
    std::unordered_map<Address, std::unique_ptr<Page>> pages;
    std::set<std::tuple<int, int, bool, int, int, bool>> known;
    std::vector<std::string> told;
    Address last = 0;
    Page* page = nullptr;
};

State all;

State& state() { return all; }

int interned(const std::string& name) {
    auto [at, is_new] = state().name_of.insert({name, int(state().names.size())});
    if (is_new) state().names.push_back(name);
    return at->second;
}

bool is_ordered(uint32_t earlier, const Clock& now) {
    const Work& work = state().works[earlier];
    return work.number <= now[work.actor];
}

std::string name_of(const Work& work) {
    return state().names[work.name] + " on " + state().actors[work.actor];
}

void tell(uint32_t earlier, bool wrote, bool writes) {
    const Work &now = state().works.back(), &then = state().works[earlier];
    const bool is_new = state()
        .known.insert({then.actor, then.name, wrote, now.actor, now.name, writes}).second;
    if (!is_new || state().told.size() >= kTold) return;
    state().told.push_back(name_of(now) + (writes ? " writes" : " reads") + " what " +
                           name_of(then) + (wrote ? " writes" : " reads") +
                           ", and nothing orders them");
}

void touch_word(Word& word, bool writes, const Clock& now) {
    const uint32_t self = uint32_t(state().works.size() - 1);
    if (word.writer && !is_ordered(word.writer, now)) tell(word.writer, true, writes);
    if (!writes) {
        int room = 0;
        for (int i = 0; i < kReaders; i++)
            if (!word.readers[i] || is_ordered(word.readers[i], now)) word.readers[room = i] = 0;
        word.readers[room] = self;
        return;
    }
    for (uint32_t& reader : word.readers) {
        if (reader && !is_ordered(reader, now)) tell(reader, false, true);
        reader = 0;
    }
    word.writer = self;
}

// Neighbours have mostly been touched alike, and become alike.
void touch_words(Word* words, size_t count, bool writes, const Clock& now) {
    Word before = {}, after = {};
    for (size_t i = 0; i < count; i++) {
        if (i && std::memcmp(&words[i], &before, sizeof(Word)) == 0) {
            words[i] = after;
            continue;
        }
        before = words[i];
        touch_word(words[i], writes, now);
        after = words[i];
    }
}

Page* page_of(Address word, bool is_wanted) {
    const Address number = word / kPageWords;
    if (number == state().last && state().page) return state().page;
    auto found = state().pages.find(number);
    if (found == state().pages.end()) {
        if (!is_wanted) return nullptr;
        found = state().pages.emplace(number, new Page()).first;
    }
    state().last = number;
    return state().page = found->second.get();
}

}  // namespace

int new_actor() {
    if (!state().free.empty()) {
        const int actor = state().free.back();
        state().free.pop_back();
        return actor;
    }
    const int actor = state().actor_count++ % kActors;
    state().actors[actor] = actor == kHost ? "the host" : "stream " + std::to_string(actor);
    return actor;
}

void end_actor(int actor) { state().free.push_back(actor); }

void name_actor(int actor, const std::string& name) { state().actors[actor] = name; }

const Clock& now(int actor) { return state().clocks[actor]; }

void follow(int actor, const Clock& moment) {
    Clock& mine = state().clocks[actor];
    for (int i = 0; i < kActors; i++) mine[i] = mine[i] < moment[i] ? moment[i] : mine[i];
}

void begin(int actor, const std::string& name) {
    if (!on) return;
    state().works.push_back({actor, interned(name), ++state().clocks[actor][actor]});
}

void touch(const void* at, size_t bytes, bool writes) {
    if (!on || !bytes) return;
    const Clock& now = state().clocks[state().works.back().actor];
    const Address first = Address(at) / kWord, last = (Address(at) + bytes - 1) / kWord;
    for (Address word = first; word <= last;) {
        const size_t offset = word % kPageWords;
        const size_t count = std::min(Address(kPageWords - offset), last - word + 1);
        touch_words(page_of(word, true)->words + offset, count, writes, now);
        word += count;
    }
}

void forget(const void* at, size_t bytes) {
    if (!on || !bytes) return;
    const Address first = Address(at) / kWord, last = (Address(at) + bytes - 1) / kWord;
    for (Address word = first; word <= last;) {
        const size_t offset = word % kPageWords;
        const Address count = std::min(Address(kPageWords - offset), last - word + 1);
        if (Page* page = page_of(word, false))
            std::memset(page->words + offset, 0, count * sizeof(Word));
        word += count;
    }
}

}  // namespace races

// All memory is new, and nothing has been told.
EXPORT void races_begin() {
    races::state().pages.clear();
    races::state().page = nullptr;
    races::state().told.clear();
    races::state().known.clear();
    races::on = true;
}
EXPORT void races_end() { races::on = false; }

EXPORT void races_touch(const void* at, size_t bytes, bool writes) {
    races::touch(at, bytes, writes);
}

// Pieces of as many bytes, so far from `at`.
EXPORT void races_touch_each(const char* at, const int64_t* offsets, size_t count, size_t bytes,
                             bool writes) {
    for (size_t i = 0; i < count; i++) races::touch(at + offsets[i], bytes, writes);
}

EXPORT void races_forget(const void* at, size_t bytes) { races::forget(at, bytes); }

// The sentence of a race; null behind the last.
EXPORT const char* races_told(size_t index) {
    const auto& told = races::state().told;
    return index < told.size() ? told[index].c_str() : nullptr;
}
