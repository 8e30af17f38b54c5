#define ESS_SET avx512
#define ESS_LANES 16
#define ESS_HALF 0
#define ESS_DECODE_GROUP decode_group_avx512
#define ESS_DECODE_GROUPS decode_groups_avx512
#define ESS_TARGET "avx512f,avx512bw,avx512vl,prefer-vector-width=512"
#include "kernels_set.h"
