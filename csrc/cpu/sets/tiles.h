// Tile registers (AMX): products of 16 rows by 16 columns of float32, over 32 bf16 at a time.
//
// An instruction multiplies tile `a` [row, word] with tile `b` [word, column], words of two bf16
// side by side along the axis that is summed over, and adds the products to tile `sum`. For each
// element the even and the odd products are summed apart, in order, and then both are added to it:
// so its bits depend on its row and its column alone, whatever else lies in the tiles.
//
// The intrinsics tell the compiler of no memory that they read and write, or of its first bytes
// alone: `settle_memory` lets it take what lies at an address as read and written there and then.
//
// Who computes with tiles holds a `Tiles`. It loads the shapes and puts back afterwards what was
// loaded before: a thread may belong to a library that has loaded shapes of its own and takes it
// that they stay. What lay in the tiles is not put back; no library keeps anything there between
// calls.
#pragma once

struct alignas(64) TileShapes {
    uint8_t palette = 0, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

ESS_LANE void settle_memory(const void* at) { __asm__ volatile("" ::"r"(at) : "memory"); }

class Tiles {
public:
    // With fewer rows than a tile has, products take less time.
    explicit Tiles(int64_t rows = kTileRows) {
        _tile_storeconfig(&before_);
        settle_memory(&before_);
        TileShapes shapes;
        shapes.palette = 1;
        for (int i = 0; i < 8; i++) {
            shapes.row_bytes[i] = 4 * kTileWords;
            shapes.rows[i] = uint8_t(i < 6 ? rows : kTileRows);
        }
        settle_memory(&shapes);
        _tile_loadconfig(&shapes);
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() {
        settle_memory(&before_);
        if (before_.palette) _tile_loadconfig(&before_);
        else _tile_release();
    }

private:
    TileShapes before_;
};

// sums[vector][row, column] of one or two tiles of rows, `row_words` apart, with one or two vectors
// of columns, or four with one tile, a panel apart; `steps` words long, `width` from a word of the
// columns to the next. Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns. What will be needed
// later is requested from memory meanwhile.
template <int tiles, int vectors, typename Later = Nothing>
ESS_LANE void multiply_tiles(const uint32_t* rows, int64_t row_words, const uint32_t* columns,
                             int64_t panel, int64_t steps, float* sums, const Later& later = {},
                             int64_t width = kLanes) {
    static_assert(tiles * vectors <= 4, "there are four sums");
    constexpr bool four = tiles == 1 && vectors == 4, square = tiles == 2 && vectors == 2;
    const int64_t stride = 4 * row_words, tile = kTileRows * kTileWords;
    settle_memory(rows);
    _tile_zero(0);
    if constexpr (tiles == 2 || four) _tile_zero(1);
    if constexpr (vectors >= 2) _tile_zero(2);
    if constexpr (square || four) _tile_zero(3);
    for (int64_t step = 0; step < steps; step += kTileWords, columns += kTileWords * width) {
        const auto lines = later.part(step / kTileWords, steps / kTileWords);
        for (int64_t line = 0; lines.wants(line); line++) lines.request(line);
        _tile_loadd(4, rows + step, stride);
        _tile_loadd(6, columns, 4 * width);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (tiles == 2) {
            _tile_loadd(5, rows + kTileRows * row_words + step, stride);
            _tile_dpbf16ps(1, 5, 6);
        }
        if constexpr (vectors >= 2) {
            _tile_loadd(7, columns + panel, 4 * width);
            _tile_dpbf16ps(2, 4, 7);
        }
        if constexpr (square) _tile_dpbf16ps(3, 5, 7);
        if constexpr (four) {
            _tile_loadd(6, columns + 2 * panel, 4 * width);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(7, columns + 3 * panel, 4 * width);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, 4 * kLanes);
    if constexpr (tiles == 2 || four) _tile_stored(1, sums + (four ? 2 : 1) * tile, 4 * kLanes);
    if constexpr (vectors >= 2) _tile_stored(2, sums + tiles * tile, 4 * kLanes);
    if constexpr (square || four) _tile_stored(3, sums + 3 * tile, 4 * kLanes);
    settle_memory(sums);
}
