// What emulated.h takes of the C++ library: for each kernel it is read compiled, not anew.
#ifndef ESS_HEADS
#define ESS_HEADS

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <ucontext.h>
#include <vector>

#endif
