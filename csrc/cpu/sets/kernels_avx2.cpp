#define ESS_SET avx2
#define ESS_LANES 8
#define ESS_HALF 0
#define ESS_DECODE_GROUP decode_group
#define ESS_DECODE_GROUPS decode_groups
#define ESS_TARGET "avx2,fma"
#include "kernels_set.h"
