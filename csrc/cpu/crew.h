// A small set of helper threads that sleep until a call wants them.
#pragma once

#include <cstdint>
#include <functional>

namespace ess {

// Calls piece(0) .. piece(piece_count - 1), each once, from this thread and up to threads - 1
// helpers; returns when all have returned. Pieces are taken one by one, so a helper that wakes
// late or runs slowly costs only the piece it holds, and a helper that never wakes costs nothing.
void run_pieces(int threads, int64_t piece_count, const std::function<void(int64_t)>& piece);

// The processor this thread is on, or -1 where the system does not say.
int this_processor();

// Moves the calling thread if it woke on `processor`, that of the thread which woke it and is still
// computing there. Schedulers that pack threads leave the two to share it, with the next processor
// idle. The thread stays free to go anywhere later; alone on its processors it stays.
void step_aside(int processor);

}  // namespace ess
