#define ESS_SET avx512_bf16
#define ESS_LANES 16
#define ESS_HALF 1
#define ESS_DECODE_GROUP decode_group_avx512
#define ESS_DECODE_GROUPS decode_groups_avx512
#define ESS_TARGET "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni,prefer-vector-width=512"
#include "kernels_set.h"
