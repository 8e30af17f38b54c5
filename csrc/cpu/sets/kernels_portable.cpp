#define ESS_SET portable
#define ESS_LANES 4
#define ESS_HALF 0
#define ESS_DECODE_GROUP decode_group
#define ESS_DECODE_GROUPS decode_groups
#include "kernels_set.h"
