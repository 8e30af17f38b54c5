// The door of stages: tokens are cut into pieces that helpers share; weights are packed.
#include <algorithm>

#include "crew.h"
#include "kernels.h"

ESS_EXPORT void ess_stage(const ess::Stage* stage, const ess::Bound* bound, int64_t tokens,
                          int32_t threads) {
    using namespace ess;
    const int64_t share = (tokens + threads - 1) / std::max(threads, 1);
    const int64_t size = std::clamp<int64_t>(share, 1, kStageTokens);
    run_pieces(threads, (tokens + size - 1) / size, [&](int64_t piece) {
        kernels().stage(*stage, bound, piece * size, std::min(tokens, (piece + 1) * size));
    });
}

// Words that `ess_pack` writes for one matrix.
ESS_EXPORT int64_t ess_panel_words(int64_t out_dim, int64_t in_dim, int64_t half) {
    const int64_t lanes = ess::kernels().lanes;
    return (out_dim + lanes - 1) / lanes * lanes * (half ? (in_dim + 1) / 2 : in_dim);
}

ESS_EXPORT void ess_pack(const uint8_t* from, int64_t form, int64_t out_dim, int64_t in_dim,
                         int64_t half, uint32_t* to) {
    ess::kernels().pack_panels(from, form, out_dim, in_dim, half != 0, to);
}

// The same for codes; `in_dim` is a multiple of 32.
ESS_EXPORT int64_t ess_code_words(int64_t out_dim, int64_t in_dim, int64_t bits) {
    const int64_t lanes = ess::kernels().lanes;
    return (out_dim + lanes - 1) / lanes * lanes * (in_dim / 32) * (bits + 1);
}

ESS_EXPORT void ess_pack_codes(const uint8_t* codes, const uint16_t* steps, int64_t bits,
                               int64_t out_dim, int64_t in_dim, uint32_t* to) {
    ess::kernels().pack_codes(codes, steps, bits, out_dim, in_dim, to);
}
