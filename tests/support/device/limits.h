// What the real driver refuses and what it does not survive, for the emulated one.
//
// It refuses with a status, as the real one does, and says why on the error stream. Where the real
// one would read or write memory that is no longer there, the process ends with a sentence: such a
// mistake has no status, and shows on a device as a crash in some later call.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace limits {

typedef unsigned long long Address;

constexpr unsigned kThreads = 1024, kBlocks = 0x7FFFFFFF, kRecordBytes = 4096;
constexpr unsigned kShared = 48 << 10, kSharedOnRequest = 227 << 10;
constexpr int kPortableCluster = 8;
constexpr int kSharedAttribute = 8, kClusterAttribute = 14;

// Memory that queued work names.
struct Span {
    Address at;
    size_t bytes;

    bool meets(Address other, size_t count) const {
        return at < other + count && other < at + bytes;
    }
};

// What may be pointers among the words of a kernel's record.
inline std::vector<Span> pointers(const std::vector<char>& record) {
    std::vector<Span> found;
    for (size_t at = 0; at + sizeof(Address) <= record.size(); at += sizeof(Address)) {
        Address word;
        std::memcpy(&word, record.data() + at, sizeof word);
        if (word >> 20) found.push_back({word, 1});
    }
    return found;
}

// A kernel that is loaded, and what was asked for it.
struct Function {
    std::string name;
    const char* (*launch)(const void*, int, int, int, uint64_t);
    int record_bytes, cluster_blocks;
    unsigned shared = kShared;
    bool large_clusters = false;
};

struct Grid {
    unsigned blocks, threads, shared;
};

inline bool refused(const std::string& sentence) {
    std::fprintf(stderr, "emulated driver: %s\n", sentence.c_str());
    return true;
}

[[noreturn]] inline void die(const std::string& sentence) {
    refused(sentence);
    std::abort();
}

inline bool refuses(const Function& function, Grid grid) {
    const auto says = [&](unsigned number, const char* what) {
        return refused(function.name + ": " + std::to_string(number) + what);
    };
    if (grid.threads < 1 || grid.threads > kThreads) return says(grid.threads, " threads a block");
    if (grid.blocks < 1 || grid.blocks > kBlocks) return says(grid.blocks, " blocks");
    if (grid.shared > function.shared) return says(grid.shared, " bytes of shared memory");
    if (function.cluster_blocks > kPortableCluster && !function.large_clusters)
        return says(function.cluster_blocks, " blocks a cluster");
    if (grid.blocks % function.cluster_blocks) return says(grid.blocks, " blocks: no clusters");
    return false;
}

// What a driver may be asked to allow for a kernel; whether it does.
inline bool allow(Function& function, int attribute, int value) {
    if (attribute == kClusterAttribute) return function.large_clusters = value, true;
    if (attribute != kSharedAttribute || value > int(kSharedOnRequest)) return false;
    return function.shared = value, true;
}

// How many bytes the caller of a launch has said that its record has; 0 where it says nothing.
inline int told_record_bytes = 0;

inline void check_record(const Function& function) {
    const int told = told_record_bytes;
    told_record_bytes = 0;
    if (told && told != function.record_bytes)
        die(function.name + " takes " + std::to_string(function.record_bytes) + " bytes, not " +
            std::to_string(told));
}

}  // namespace limits
