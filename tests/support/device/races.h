// Which streams touch which memory, and what orders them (races.cpp). The driver tells who works
// and what waits for what, the watch what kernels touch, Python what torch does.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace races {

constexpr int kActors = 64, kHost = 0;

// How much of the work of each actor came before a moment. An actor is a stream, or the host.
typedef std::array<uint32_t, kActors> Clock;

extern bool on;

int new_actor();
void end_actor(int actor);
void name_actor(int actor, const std::string& name);

const Clock& now(int actor);
// What the actor does from here on comes behind that moment.
void follow(int actor, const Clock& moment);

// The actor's next piece of work begins; touches are its own until another begins.
void begin(int actor, const std::string& name);
void touch(const void* at, size_t bytes, bool writes);
// Memory that is given out anew has no past.
void forget(const void* at, size_t bytes);

}  // namespace races
