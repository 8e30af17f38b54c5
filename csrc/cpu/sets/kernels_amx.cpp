// Products of tiles, which avx512_bf16 calls where they fit. A test's build plays the tiles.
#ifdef ESS_EMULATED_TILES
#include ESS_EMULATED_TILES
#endif

#define ESS_SET amx
#define ESS_LANES 16
#define ESS_HALF 1
#define ESS_TILES 1
#define ESS_DECODE_GROUP decode_group_avx512
#define ESS_DECODE_GROUPS decode_groups_avx512
#ifdef ESS_EMULATED_TILES
#define ESS_TARGET "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni,prefer-vector-width=512"
#else
#define ESS_TARGET \
    "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16,prefer-vector-width=512"
#endif
#include "kernels_set.h"
