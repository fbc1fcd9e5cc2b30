// Kernels that attention.py, feedforward.py, dropout.py and lm_head.py run on a CPU. kernels/cpu/build.py compiles this file.
// kernels/cpu/attention.py derives the equations of attention. Matrix products use the BLAS of torch.
// Inputs and outputs are in fp32, fp64 or bf16. Kernels compute in fp32 for bf16, with one exception: if this file is compiled for
// instructions that multiply bf16 (AVX512-BF16, AMX), attention for bf16 rounds the factors of its products to bf16 and multiplies them itself.
//
// One thread computes one head of one batch row, a block of query rows at a time, so that the scores of a block stay in its cache. No two
// threads add to the same address, so results have the same bits with any number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

const double MASKED = -1e30;  // score of a key that is not visible

template <class To, class From>
inline To bit_cast(From x) {
    To y;
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&y, &x, sizeof(To));
    return y;
}

// The upper 16 bits of a float. An enumeration, because compilers do not vectorize loops over a class.
enum class BFloat16 : uint16_t {};

// Type in which a kernel computes with elements of type T.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, BFloat16>, float, T>;

template <class T>
inline T load(T x) { return x; }
inline float load(BFloat16 x) { return bit_cast<float>(uint32_t(x) << 16); }

template <class T>
inline void store(T& y, T x) { y = x; }
inline void store(BFloat16& y, float x) {  // rounds to the nearest number, or to the even one of two
    const uint32_t b = bit_cast<uint32_t>(x), rounded = b + 0x7fff + ((b >> 16) & 1);
    y = BFloat16((x == x ? rounded : 0x7fc00000) >> 16);  // nan stays nan
}

template <class T>
using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*, const T*, const int*, const T*,
                      const int*, const T*, T*, const int*);

template <class T>
Gemm<T> gemm = nullptr;

// Row-major matrix. `stride` is the distance between the starts of two rows, in elements.
template <class T>
struct Matrix {
    T* data;
    int stride;
    bool transposed = false;

    Matrix t() const { return {data, stride, !transposed}; }
};

// c (m, n) = a (m, k) b (k, n) + beta c. BLAS is column-major, so it is called for the transposed product.
template <class T>
void multiply(int m, int n, int k, Matrix<const T> a, Matrix<const T> b, T beta, Matrix<T> c) {
    const T alpha = 1;
    gemm<T>(b.transposed ? "T" : "N", a.transposed ? "T" : "N", &n, &m, &k, &alpha, b.data, &b.stride, a.data, &a.stride, &beta, c.data,
            &c.stride);
}

#ifndef __AMX_BF16__
struct TileRegisters {  // without AMX, there is nothing to configure
    explicit TileRegisters(bool) {}
};
#endif

#ifdef __AVX512BF16__
using Pair = uint32_t;  // two bf16 numbers, the first in the lower half
const int LANES = 16;   // pairs or floats of a vector

inline __mmask16 first_lanes(int n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : __mmask16((1 << n) - 1); }

inline int round_up(int n) { return (n + LANES - 1) / LANES * LANES; }

// Matrix of pairs, with memory for whole blocks of 16 rows and columns. The memory is reused, so elements that are not written are arbitrary.
struct PairMatrix {
    std::vector<Pair> memory;
    Pair* data = nullptr;
    int stride = 0;

    void resize(int rows, int columns) {
        stride = round_up(columns);
        const size_t size = size_t(round_up(rows)) * stride + LANES;
        if (memory.size() < size) memory.resize(size);
        data = memory.data() + (LANES - (reinterpret_cast<uintptr_t>(memory.data()) / sizeof(Pair)) % LANES) % LANES;
    }
};

// The first n of 16 or 32 neighbors in bf16, followed by zeros.
inline __m256i load_16(const float* x, int n) { return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first_lanes(n), x)); }
inline __m256i load_16(const BFloat16* x, int n) { return _mm256_maskz_loadu_epi16(first_lanes(n), x); }
template <class P>
inline __m512i load_32(const P* x, int n) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_16(x, n)), load_16(x + LANES, n - LANES), 1);
}

// y (n, (k + 1) / 2): pairs of neighbors in the rows of x (n, k). Zeros follow in each row, up to a multiple of 16 pairs.
template <class P>
void pair_columns(int n, int k, const P* x, int stride, PairMatrix& y) {
    y.resize(n, (k + 1) / 2);
    for (int i = 0; i < n; i++)
        for (int p = 0; p < y.stride; p += LANES)
            _mm512_store_si512(y.data + int64_t(i) * y.stride + p, load_32(x + int64_t(i) * stride + 2 * p, k - 2 * p));
}

// y ((k + 1) / 2, n): pairs of neighbors in the columns of x (k, n). Rows of zeros follow, up to a multiple of 16 rows.
template <class P>
void pair_rows(int k, int n, const P* x, int stride, PairMatrix& y) {
    alignas(64) uint16_t alternate[2 * LANES];  // 0, 16, 1, 17, ...
    for (int i = 0; i < LANES; i++) alternate[2 * i] = i, alternate[2 * i + 1] = LANES + i;
    const __m512i order = _mm512_load_si512(alternate);
    y.resize((k + 1) / 2, n);
    for (int p = 0; p < round_up((k + 1) / 2); p++)
        for (int j = 0; j < n; j += LANES) {
            const P* row = x + 2 * int64_t(p) * stride + j;
            const __m256i first = load_16(row, 2 * p < k ? n - j : 0), second = load_16(row + stride, 2 * p + 1 < k ? n - j : 0);
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
            _mm512_store_si512(y.data + int64_t(p) * y.stride + j, _mm512_permutexvar_epi16(order, both));
        }
}

// y (n, m) = x (m, n) transposed, in whole blocks of 16 rows and columns.
void transpose(int m, int n, const PairMatrix& x, PairMatrix& y) {
    y.resize(n, m);
    for (int i = 0; i < m; i += LANES)
        for (int j = 0; j < n; j += LANES) {
            __m512i a[LANES], b[LANES];
            for (int r = 0; r < LANES; r++) a[r] = _mm512_load_si512(x.data + int64_t(i + r) * x.stride + j);
            for (int r = 0; r < LANES; r += 2) {
                b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
                b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
            }
            for (int r = 0; r < LANES; r += 4) {  // now a[r + c] has the columns c, c + 4, c + 8 and c + 12 of the rows r to r + 3
                a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
                a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
                a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
                a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
            }
            for (int c = 0; c < 4; c++) {
                const __m512i even = _mm512_shuffle_i32x4(a[c], a[c + 4], 0x88), odd = _mm512_shuffle_i32x4(a[c], a[c + 4], 0xdd);
                const __m512i even2 = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0x88), odd2 = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0xdd);
                b[c] = _mm512_shuffle_i32x4(even, even2, 0x88);
                b[c + 4] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
                b[c + 8] = _mm512_shuffle_i32x4(even, even2, 0xdd);
                b[c + 12] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
            }
            for (int c = 0; c < LANES; c++) _mm512_store_si512(y.data + int64_t(j + c) * y.stride + i, b[c]);
        }
}

#ifdef __AMX_BF16__
const int TILE = 16;  // rows of a tile; a row has 16 pairs or floats

// Configures the tile registers of this thread: eight tiles of full size.
struct TileRegisters {
    explicit TileRegisters(bool needed) : needed(needed) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
        } config;
        asm volatile("" : : "r"(&config) : "memory");  // older versions of GCC do not know that the next line reads all of `config`
        if (needed) _tile_loadconfig(&config);
    }
    ~TileRegisters() {
        if (needed) _tile_release();
    }

    const bool needed;
};

// c = a b, or c + a b if `add`, for ROWS tiles below each other and COLUMNS tiles beside each other, which are 1 or 2.
template <int ROWS, int COLUMNS>
void multiply_tiles(int pairs, const Pair* a, int a_stride, const Pair* b, int b_stride, bool add, float* c, int c_stride) {
    const int64_t a_bytes = a_stride * sizeof(Pair), b_bytes = b_stride * sizeof(Pair), c_bytes = c_stride * sizeof(float);
    float* lower = c + int64_t(TILE) * c_stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (add) {
        _tile_loadd(0, c, c_bytes);
        if constexpr (COLUMNS == 2) _tile_loadd(1, c + TILE, c_bytes);
        if constexpr (ROWS == 2) _tile_loadd(2, lower, c_bytes);
        if constexpr (ROWS == 2 && COLUMNS == 2) _tile_loadd(3, lower + TILE, c_bytes);
    }
    for (int p = 0; p < pairs; p += LANES) {
        const Pair* right = b + int64_t(p) * b_stride;
        _tile_loadd(4, a + p, a_bytes);
        _tile_loadd(6, right, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (COLUMNS == 2) _tile_loadd(7, right + TILE, b_bytes);
        if constexpr (COLUMNS == 2) _tile_dpbf16ps(1, 4, 7);
        if constexpr (ROWS == 2) _tile_loadd(5, a + int64_t(TILE) * a_stride + p, a_bytes);
        if constexpr (ROWS == 2) _tile_dpbf16ps(2, 5, 6);
        if constexpr (ROWS == 2 && COLUMNS == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    if constexpr (COLUMNS == 2) _tile_stored(1, c + TILE, c_bytes);
    if constexpr (ROWS == 2) _tile_stored(2, lower, c_bytes);
    if constexpr (ROWS == 2 && COLUMNS == 2) _tile_stored(3, lower + TILE, c_bytes);
}

// c (m, n) = left right, or c + left right if `add`.
void multiply_pairs(int m, int n, int pairs, const PairMatrix& left, const PairMatrix& right, bool add, Matrix<float> c) {
    alignas(64) float part[2 * TILE * 2 * TILE];
    asm volatile("" ::: "memory");  // GCC does not know that _tile_loadd reads memory
    for (int j = 0; j < n; j += 2 * TILE)
        for (int i = 0; i < m; i += 2 * TILE) {
            const int rows = std::min(m - i, 2 * TILE), columns = std::min(n - j, 2 * TILE);
            const bool two_rows = rows > TILE, two_columns = columns > TILE;
            const auto multiply = two_rows ? (two_columns ? multiply_tiles<2, 2> : multiply_tiles<2, 1>)
                                           : (two_columns ? multiply_tiles<1, 2> : multiply_tiles<1, 1>);
            const Pair *a = left.data + int64_t(i) * left.stride, *b = right.data + j;
            float* target = c.data + int64_t(i) * c.stride + j;
            if (rows % TILE == 0 && columns % TILE == 0) {
                multiply(pairs, a, left.stride, b, right.stride, add, target, c.stride);
                continue;
            }
            multiply(pairs, a, left.stride, b, right.stride, false, part, 2 * TILE);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < columns; v += LANES) {
                    const __mmask16 mask = first_lanes(columns - v);
                    float* y = target + int64_t(r) * c.stride + v;
                    const __m512 x = _mm512_load_ps(part + r * 2 * TILE + v);
                    _mm512_mask_storeu_ps(y, mask, add ? _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, y)) : x);
                }
        }
}
#else
const int TILE_ROWS = 8;  // rows and vectors of a row that a tile of the product keeps in registers
const int TILE_VECTORS = 3;

// Tile of multiply_pairs: ROWS rows of c and VECTORS vectors, the last one with a mask. The loops are unrolled so that GCC keeps the sums in
// registers.
template <int ROWS, int VECTORS>
void multiply_tile(int pairs, const Pair* a, int64_t a_stride, const Pair* b, int64_t b_stride, __mmask16 mask, bool add, float* c,
                   int64_t c_stride) {
    __m512 sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sum[r][v] = _mm512_setzero_ps();
    for (int p = 0; p < pairs; p++) {
        __m512i columns[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) columns[v] = _mm512_load_si512(b + p * b_stride + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const __m512i row = _mm512_set1_epi32(int(a[r * a_stride + p]));
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)columns[v], (__m512bh)row);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const __mmask16 lanes = v == VECTORS - 1 ? mask : __mmask16(0xffff);
            float* target = c + r * c_stride + v * LANES;
            const __m512 x = add ? _mm512_add_ps(sum[r][v], _mm512_maskz_loadu_ps(lanes, target)) : sum[r][v];
            _mm512_mask_storeu_ps(target, lanes, x);
        }
}

template <int VECTORS>
void multiply_panel(int m, int pairs, const Pair* a, int64_t a_stride, const Pair* b, int64_t b_stride, __mmask16 mask, bool add, float* c,
                    int64_t c_stride) {
    int i = 0;
    for (; i + TILE_ROWS <= m; i += TILE_ROWS)
        multiply_tile<TILE_ROWS, VECTORS>(pairs, a + i * a_stride, a_stride, b, b_stride, mask, add, c + i * c_stride, c_stride);
    for (; i < m; i++) multiply_tile<1, VECTORS>(pairs, a + i * a_stride, a_stride, b, b_stride, mask, add, c + i * c_stride, c_stride);
}

// c (m, n) = left right, or c + left right if `add`.
void multiply_pairs(int m, int n, int pairs, const PairMatrix& left, const PairMatrix& right, bool add, Matrix<float> c) {
    for (int j = 0; j < n; j += TILE_VECTORS * LANES) {
        const int vectors = std::min((n - j + LANES - 1) / LANES, TILE_VECTORS);
        const auto panel = vectors == 3 ? multiply_panel<3> : vectors == 2 ? multiply_panel<2> : multiply_panel<1>;
        panel(m, pairs, left.data, left.stride, right.data + j, right.stride, first_lanes(n - j - (vectors - 1) * LANES), add, c.data + j,
              c.stride);
    }
}
#endif

// c (m, n) = a (m, k) b (k, n) + beta c, where beta is 0 or 1. a and b are rounded to bf16; the sums are in fp32.
template <class A, class B>
void multiply_bf16(int m, int n, int k, Matrix<const A> a, Matrix<const B> b, float beta, Matrix<float> c) {
    thread_local PairMatrix left, right, rounded;
    const int pairs = (k + 1) / 2;
    if (a.transposed) {
        pair_rows(k, m, a.data, a.stride, rounded);
        transpose(pairs, m, rounded, left);
    } else {
        pair_columns(m, k, a.data, a.stride, left);
    }
    if (b.transposed) {
        pair_columns(n, k, b.data, b.stride, rounded);
        transpose(n, pairs, rounded, right);
    } else {
        pair_rows(k, n, b.data, b.stride, right);
    }
    multiply_pairs(m, n, pairs, left, right, beta != 0, c);
}
#else
// The matrix x, which has `rows` rows of `columns` elements before transposition, in fp32.
inline Matrix<const float> widen(int, int, Matrix<const float> x, std::vector<float>&) { return x; }
inline Matrix<const float> widen(int rows, int columns, Matrix<const BFloat16> x, std::vector<float>& memory) {
    const size_t size = size_t(rows) * columns;
    if (memory.size() < size) memory.resize(size);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) memory[int64_t(i) * columns + j] = load(x.data[int64_t(i) * x.stride + j]);
    return {memory.data(), columns, x.transposed};
}

template <class A, class B>
void multiply_bf16(int m, int n, int k, Matrix<const A> a, Matrix<const B> b, float beta, Matrix<float> c) {
    thread_local std::vector<float> left, right;
    multiply<float>(m, n, k, widen(a.transposed ? k : m, a.transposed ? m : k, a, left),
                    widen(b.transposed ? n : k, b.transposed ? k : n, b, right), beta, c);
}
#endif

inline double exponential(double x) { return std::exp(x); }

// 2^n e^f with |f| <= ln(2) / 2. e^f is the minimax polynomial 1 + f + c f^2 + ... of degree 5; its relative error is at most 1e-7.
// Compilers vectorize it. x is clamped to [-60, 60], because smaller results would lead to denormal numbers, which are slow.
inline float exponential(float x) {
    x = std::min(std::max(x, -60.0f), 60.0f);
    const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23 moves the integer part into the lowest bits
    const float n = shifted - 12582912.0f;
    const float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts
    float sum = 0.00831252505f;
    sum = sum * f + 0.0418901138f;
    sum = sum * f + 0.166671145f;
    sum = sum * f + 0.499992318f;
    sum = sum * f + 1.0f;
    sum = sum * f + 1.0f;
    return sum * bit_cast<float>((bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u);
}

// Counter-based random numbers: the k-th of a stream (lowbias32 by Ellis, with a second key between its rounds).
struct RandomStream {
    uint32_t key, second_key;

    RandomStream(uint64_t seed, uint64_t stream) {  // splitmix64
        uint64_t x = seed + (stream + 1) * 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x ^= x >> 31;
        key = uint32_t(x), second_key = uint32_t(x >> 32);
    }

    uint32_t operator()(uint32_t k) const {
        uint32_t x = k + key;
        x = (x ^ (x >> 16)) * 0x7feb352du ^ second_key;
        x = (x ^ (x >> 15)) * 0x846ca68bu;
        return x ^ (x >> 16);
    }
};

// Zeroes the elements whose random number is below `drop_threshold`. The others are multiplied by `scale`.
template <class T>
void apply_dropout(RandomStream random, uint32_t drop_threshold, Compute<T> scale, int n, const T* x, T* y) {
#pragma omp simd
    for (int j = 0; j < n; j++) {
        const Compute<T> scaled = load(x[j]) * scale;
        store(y[j], random(j) >= drop_threshold ? scaled : 0);
    }
}

// AttentionArgs of kernels/cpu/attention.py, field by field. S: type of the inputs, the output and the gradients of queries, keys and
// values. T: type of probabilities and of the other gradients, which attention.py sums over the batch rows.
template <class S>
struct AttentionArgs {
    using T = Compute<S>;

    int64_t B, N, K, H, E, R, n_tokens, n_self_visible, max_distance, n_blocks, block_rows, n_threads, seed, drop_threshold;
    double scale, dropout_scale;
    const int32_t *query_rank, *key_rank, *row_segments, *key_segments, *positions, *direction;
    const int32_t* block_start;                                  // (n_blocks + 1)
    int32_t *first_key, *n_keys, *first_distance, *n_distances;  // (B, n_blocks)
    const S *query, *r_w_bias, *r_r_bias, *pos_key, *pos_offset, *r_s_bias, *segment_diff, *key, *value;
    S* out;
    T *probs, *lse;
    const S* d_out;
    S* d_query;
    T *d_r_w_bias, *d_r_r_bias, *d_pos_key, *d_pos_offset, *d_r_s_bias, *d_segment_diff;
    S *d_key, *d_value;
};

// y (rows, columns) = x, with x_stride and y_stride elements between the starts of two rows.
template <class From, class To>
void convert(int rows, int columns, const From* x, int64_t x_stride, To* y, int64_t y_stride) {
    for (int i = 0; i < rows; i++)
#pragma omp simd
        for (int j = 0; j < columns; j++) store(y[i * y_stride + j], load(x[i * x_stride + j]));
}

// Attention of one head of one batch row. Members without a comment hold values of the current block.
template <class S>
class HeadKernel {
    using T = Compute<S>;

  public:
    explicit HeadKernel(const AttentionArgs<S>& a)
        : a(a), E(a.E), stride(a.H * a.E), drop_threshold(a.drop_threshold), dropout_scale(a.dropout_scale),
          content_query(a.block_rows * a.E), pos_query(content_query.size()), output(content_query.size()),
          d_content_query(a.d_key ? content_query.size() : 0), d_pos_query(d_content_query.size()), score(a.block_rows * a.K),
          d_score(a.d_key ? score.size() : 0), dropped(a.drop_threshold ? d_score.size() : 0),
          pos_score(a.pos_key ? a.block_rows * a.R : 0), zeros(a.K), segment_score(a.block_rows), row_max(a.block_rows),
          d_key(a.d_key ? a.K * a.E : 0), d_value(d_key.size()) {}

    void forward(int batch, int head) {
        for (int i = 0; i < a.n_blocks; i++) {
            select_block(batch, head, i);
            compute_queries();
            compute_scores();
            for (int r = 0; r < n; r++) {
                T* s = &score[int64_t(r) * k];
                const T lse = softmax(s, row_max[r]);
                if (a.lse) a.lse[head_row(r)] = lse;
                if (a.probs) std::copy(s, s + k, a.probs + head_row(r) * a.K);
                if (a.drop_threshold) apply_dropout(random(r), drop_threshold, dropout_scale, k, s, s);
            }
            product(n, E, k, scores(score, k), inputs(keys(a.value)), 0, {output.data(), E});
            convert(n, E, output.data(), E, rows(a.out), stride);
        }
    }

    void backward(int batch, int head) {
        const int64_t bias_offset = (int64_t(batch) * a.H + head) * E;
        std::fill(d_key.begin(), d_key.end(), T(0));
        std::fill(d_value.begin(), d_value.end(), T(0));
        for (int i = 0; i < a.n_blocks; i++) {
            select_block(batch, head, i);
            compute_queries();
            if (a.probs)
                for (int r = 0; r < n; r++) std::copy_n(a.probs + head_row(r) * a.K, k, &score[int64_t(r) * k]);
            else
                recompute_probs();
            const std::vector<T>& weights = a.drop_threshold ? dropped : score;
            for (int r = 0; a.drop_threshold && r < n; r++)
                apply_dropout(random(r), drop_threshold, dropout_scale, k, &score[int64_t(r) * k], &dropped[int64_t(r) * k]);
            product(k, E, n, scores(weights, k).t(), inputs(rows(a.d_out)), 1, {&d_value[first_key * E], E});
            product(n, k, E, inputs(rows(a.d_out)), inputs(keys(a.value)).t(), 0, {d_score.data(), k});
            for (int r = 0; r < n; r++) backward_softmax(r, &weights[int64_t(r) * k]);
            product(n, E, k, scores(d_score, k), inputs(keys(a.key)), 0, {d_content_query.data(), E});
            product(k, E, n, scores(d_score, k).t(), scores(content_query, E), 1, {&d_key[first_key * E], E});
            if (a.pos_key) {
                product(n, E, m, scores(pos_score, m), inputs(distances(a.pos_key)), 0, {d_pos_query.data(), E});
                product(m, E, n, scores(pos_score, m).t(), scores(pos_query, E), 1, {d_distances(), stride});
            }
            for (int r = 0; r < n; r++) backward_query(r, bias_offset);
            if (a.pos_offset) backward_pos_offset();
        }
        b = batch, h = head, first_key = 0;  // without query rows, there was no block
        convert(int(a.K), E, d_key.data(), E, keys(a.d_key), stride);
        convert(int(a.K), E, d_value.data(), E, keys(a.d_value), stride);
    }

  private:
    const AttentionArgs<S>& a;
    const int E, stride;  // stride: elements between two rows or keys of a head
    const uint32_t drop_threshold;
    const T dropout_scale;
    // batch row b, head h, first query row, number of query rows n, first key, number of keys k, first distance, number of distances m
    int b, h, first_row, n, first_key, k, first_distance, m, direction;
    // pos_score: (n, m); in the backward pass, its gradient. segment_score: (n); in the backward pass, its gradient.
    std::vector<T> content_query, pos_query, output, d_content_query, d_pos_query, score, d_score, dropped, pos_score, zeros, segment_score,
        row_max;
    std::vector<T> d_key, d_value;  // (K, E), sums over blocks

    template <class A, class B>
    static void product(int rows, int columns, int terms, Matrix<const A> left, Matrix<const B> right, T beta, Matrix<T> result) {
        if constexpr (std::is_same_v<S, BFloat16>)
            multiply_bf16(rows, columns, terms, left, right, beta, result);
        else
            multiply<T>(rows, columns, terms, left, right, beta, result);
    }

    static Matrix<const T> scores(const std::vector<T>& x, int stride) { return {x.data(), stride}; }
    Matrix<const S> inputs(const S* x) const { return {x, stride}; }

    void select_block(int batch, int head, int block) {
        const int64_t i = batch * a.n_blocks + block;
        b = batch, h = head, first_row = a.block_start[block], n = a.block_start[block + 1] - first_row;
        first_key = a.first_key[i], k = a.n_keys[i], first_distance = a.first_distance[i], m = a.n_distances[i];
        direction = a.direction[b];
    }

    int64_t row(int r) const { return b * a.N + first_row + r; }
    int64_t head_row(int r) const { return (b * a.H + h) * a.N + first_row + r; }
    template <class P>
    P* rows(P* x) const { return x + (row(0) * a.H + h) * E; }
    template <class P>
    P* keys(P* x) const { return x + ((b * a.K + first_key) * a.H + h) * E; }
    template <class P>
    P* distances(P* x) const { return x + ((direction * a.R + first_distance) * a.H + h) * E; }
    T* d_distances() const { return a.d_pos_key + ((b * a.R + first_distance) * a.H + h) * E; }
    // index of the key at the position of a row, counted from the first key of the block
    int self_key(int r) const { return a.positions[row(r)] + int(a.K - a.n_tokens) - first_key; }
    // index of the distance between a row and the first key of the block, counted from the first distance of the block
    int shift(int r) const { return int(a.n_tokens) - a.positions[row(r)] + first_key - first_distance; }
    RandomStream random(int r) const { return RandomStream(a.seed, head_row(r)); }
    const S* of_head(const S* bias) const { return bias ? bias + h * E : nullptr; }

    // Compute the queries with the bias of each term, times `scale`, and the segment scores.
    void compute_queries() {
        const S *r_w_bias = of_head(a.r_w_bias), *r_r_bias = of_head(a.r_r_bias), *r_s_bias = of_head(a.r_s_bias);
        const S* segment_diff = of_head(a.segment_diff);
        const T scale = a.scale;
        for (int r = 0; r < n; r++) {
            const S* query = rows(a.query) + int64_t(r) * stride;
            for (int e = 0; e < E; e++) content_query[r * E + e] = (load(query[e]) + (r_w_bias ? load(r_w_bias[e]) : 0)) * scale;
            for (int e = 0; e < E; e++) pos_query[r * E + e] = (load(query[e]) + (r_r_bias ? load(r_r_bias[e]) : 0)) * scale;
            T sum = 0;
            for (int e = 0; segment_diff && e < E; e++)
                sum += (load(query[e]) + (r_s_bias ? load(r_s_bias[e]) : 0)) * scale * load(segment_diff[e]);
            segment_score[r] = sum;
        }
    }

    // Compute the sum of all score terms, or MASKED for keys that are not visible, and the maximum of each row.
    void compute_scores() {
        product(n, k, E, scores(content_query, E), inputs(keys(a.key)).t(), 0, {score.data(), k});
        if (a.pos_key) product(n, m, E, scores(pos_query, E), inputs(distances(a.pos_key)).t(), 0, {pos_score.data(), m});
        for (int r = 0; r < n; r++) finish_scores(r);
    }

    // Add position and segment scores to the content scores of a row, and mask them.
    void finish_scores(int r) {
        T* s = &score[int64_t(r) * k];
        const T* pos = a.pos_key ? &pos_score[int64_t(r) * m + shift(r)] : zeros.data();
        const T t = segment_score[r], scale = a.scale, masked = MASKED;
        if (a.pos_offset) {
            const S* offsets = a.pos_offset + (direction * a.H + h) * a.R + first_distance + shift(r);
#pragma omp simd
            for (int j = 0; j < k; j++) s[j] += load(offsets[j]) * scale;
        }
        const int32_t rank = a.query_rank[row(r)], segment = a.row_segments[row(r)];
        const int32_t *ranks = a.key_rank + b * a.K + first_key, *segments = a.key_segments + b * a.K + first_key;
        const int self = self_key(r), first_in_range = a.max_distance < 0 ? 0 : std::clamp(self - int(a.max_distance), 0, k);
        const bool sees_self = first_row + r < a.n_self_visible;
        const T self_score = sees_self ? s[self] + pos[self] + (segments[self] != segment ? t : T(0)) : T(0);
        std::fill(s, s + first_in_range, masked);
        T maximum = sees_self ? self_score : masked;
#pragma omp simd reduction(max : maximum)
        for (int j = first_in_range; j < k; j++) {
            const T x = s[j] + pos[j] + (segments[j] != segment ? t : T(0));
            s[j] = ranks[j] < rank ? x : masked;
            maximum = s[j] > maximum ? s[j] : maximum;
        }
        if (sees_self) s[self] = self_score;
        row_max[r] = maximum;
    }

    // Turn the scores of a row into probabilities, all 0 if no key is visible. Returns their log-sum-exp.
    T softmax(T* s, T maximum) const {
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < k; j++) {
            const T e = s[j] <= T(MASKED / 2) ? T(0) : exponential(s[j] - maximum);  // nan stays nan
            s[j] = e;
            sum += e;
        }
        const T inverse = sum == 0 ? 0 : 1 / sum;
#pragma omp simd
        for (int j = 0; j < k; j++) s[j] *= inverse;
        return maximum + std::log(sum);
    }

    // Compute the probabilities again if the forward pass did not save them.
    void recompute_probs() {
        compute_scores();
        for (int r = 0; r < n; r++) {
            T* s = &score[int64_t(r) * k];
            const T lse = a.lse[head_row(r)];
#pragma omp simd
            for (int j = 0; j < k; j++) s[j] = s[j] <= T(MASKED / 2) ? T(0) : exponential(s[j] - lse);
        }
    }

    // Replace the gradient of a row's attention weights by the gradient of its scores, and store this by key and by distance.
    void backward_softmax(int r, const T* weights) {
        const T* p = &score[int64_t(r) * k];
        T *d = &d_score[int64_t(r) * k], delta = 0, d_segment = 0;
#pragma omp simd reduction(+ : delta)
        for (int j = 0; j < k; j++) delta += weights[j] * d[j];
        const int32_t segment = a.row_segments[row(r)], *segments = a.key_segments + b * a.K + first_key;
#pragma omp simd reduction(+ : d_segment)
        for (int j = 0; j < k; j++) {
            d[j] = weights[j] * d[j] - p[j] * delta;
            d_segment += segments[j] != segment ? d[j] : T(0);
        }
        segment_score[r] = d_segment;
        if (!a.pos_key) return;
        T* by_distance = &pos_score[int64_t(r) * m];
        const int start = shift(r);
        std::fill(by_distance, by_distance + start, T(0));
        std::copy(d, d + k, by_distance + start);
        std::fill(by_distance + start + k, by_distance + m, T(0));
    }

    // Compute the gradient of a row's query, and add the row's contributions to the gradients of the biases and of segment_diff.
    void backward_query(int r, int64_t bias_offset) {
        const S *query = rows(a.query) + int64_t(r) * stride, *segment_diff = of_head(a.segment_diff), *r_s_bias = of_head(a.r_s_bias);
        const T *c = &d_content_query[r * E], *p = &d_pos_query[r * E], scale = a.scale, d_segment = segment_score[r] * scale;
        S* d = rows(a.d_query) + int64_t(r) * stride;
        for (int e = 0; e < E; e++) {
            const T by_position = a.pos_key ? p[e] : T(0), by_segment = segment_diff ? d_segment * load(segment_diff[e]) : T(0);
            store(d[e], (c[e] + by_position) * scale + by_segment);
        }
        if (a.r_w_bias)
            for (int e = 0; e < E; e++) a.d_r_w_bias[bias_offset + e] += c[e] * scale;
        if (a.r_r_bias)
            for (int e = 0; e < E; e++) a.d_r_r_bias[bias_offset + e] += p[e] * scale;
        if (!segment_diff) return;
        for (int e = 0; e < E; e++) {
            a.d_segment_diff[bias_offset + e] += d_segment * (load(query[e]) + (r_s_bias ? load(r_s_bias[e]) : 0));
            if (r_s_bias) a.d_r_s_bias[bias_offset + e] += d_segment * load(segment_diff[e]);
        }
    }

    void backward_pos_offset() {
        T* sums = a.d_pos_offset + (b * a.H + h) * a.R + first_distance;
        for (int r = 0; r < n; r++)
            for (int j = 0; j < m; j++) sums[j] += pos_score[int64_t(r) * m + j] * T(a.scale);
    }
};

template <class S, class Function>
void for_each_head(const AttentionArgs<S>& a, Function compute) {
#pragma omp parallel num_threads(a.n_threads)
    {
        HeadKernel<S> kernel(a);
        const TileRegisters registers(std::is_same_v<S, BFloat16>);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < a.B * a.H; i++) compute(kernel, int(i / a.H), int(i % a.H));
    }
}

const int64_t CHUNK = 4096;  // elements that a thread computes at a time

template <class Function>
void for_each_chunk(int64_t n, int64_t n_threads, Function compute) {
    const int64_t chunks = (n + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(std::min(n_threads, chunks / 8 + 1))
    for (int64_t i = 0; i < chunks; i++) compute(i, i * CHUNK, std::min(n, (i + 1) * CHUNK));
}

const double LINEAR = 1.5957691216057308, CUBIC = 0.044715 * LINEAR;  // 2 sqrt(2 / pi)

template <class T>
inline T gelu_sigmoid(T x) {
    return 1 / (1 + exponential(-x * (T(LINEAR) + T(CUBIC) * x * x)));
}

template <class T>
void gelu(int64_t n, int64_t n_threads, const T* x, T* y) {
    for_each_chunk(n, n_threads, [=](int64_t, int64_t start, int64_t end) {
#pragma omp simd
        for (int64_t i = start; i < end; i++) {
            const Compute<T> v = load(x[i]);
            store(y[i], v * gelu_sigmoid(v));
        }
    });
}

template <class T>
void gelu_backward(int64_t n, int64_t n_threads, const T* x, const T* d_y, T* d_x) {
    for_each_chunk(n, n_threads, [=](int64_t, int64_t start, int64_t end) {
#pragma omp simd
        for (int64_t i = start; i < end; i++) {
            using C = Compute<T>;
            const C v = load(x[i]), s = gelu_sigmoid(v);
            store(d_x[i], load(d_y[i]) * (s + s * (1 - s) * v * (C(LINEAR) + 3 * C(CUBIC) * v * v)));
        }
    });
}

template <class T>
void dropout(int64_t n, int64_t n_threads, const T* x, int64_t seed, int64_t drop_threshold, double scale, T* y) {
    for_each_chunk(n, n_threads, [=](int64_t chunk, int64_t start, int64_t end) {
        apply_dropout(RandomStream(seed, chunk), uint32_t(drop_threshold), Compute<T>(scale), int(end - start), x + start, y + start);
    });
}

// Overwrites each row of `logits` (n, n_classes), to which `bias` is added, with the gradient of its cross entropy: the softmax
// probabilities, minus 1 at the target.
template <class T>
void cross_entropy(int64_t n, int64_t n_threads, int64_t n_classes, const Compute<T>* bias, const int64_t* targets, T* logits,
                   Compute<T>* losses) {
    using C = Compute<T>;
#pragma omp parallel num_threads(n_threads)
    {
        std::vector<C> scores(n_classes);
        C* s = scores.data();
#pragma omp for
        for (int64_t i = 0; i < n; i++) {
            T* row = logits + i * n_classes;
            C maximum = -std::numeric_limits<C>::infinity(), sum = 0;
#pragma omp simd reduction(max : maximum)
            for (int64_t j = 0; j < n_classes; j++) {
                s[j] = load(row[j]) + bias[j];
                maximum = s[j] > maximum ? s[j] : maximum;
            }
            const C target = s[targets[i]];
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < n_classes; j++) {
                s[j] = exponential(s[j] - maximum);
                sum += s[j];
            }
            losses[i] = maximum + std::log(sum) - target;
            const C inverse = 1 / sum;
            const C gradient = s[targets[i]] * inverse - 1;
#pragma omp simd
            for (int64_t j = 0; j < n_classes; j++) store(row[j], s[j] * inverse);
            store(row[targets[i]], gradient);
        }
    }
}

template <class T>
bool is_visible(const AttentionArgs<T>& a, int64_t b, int64_t row, int64_t key) {
    const int64_t self = a.positions[b * a.N + row] + a.K - a.n_tokens;
    const bool visible = a.key_rank[b * a.K + key] < a.query_rank[b * a.N + row] || (row < a.n_self_visible && key == self);
    return visible && (a.max_distance < 0 || self - key <= a.max_distance);
}

// Set, for each block of query rows, the range of keys from the first to the last that any row sees (at least one key), and the range of
// their distances.
template <class T>
void schedule_blocks(const AttentionArgs<T>& a) {
    for (int64_t b = 0; b < a.B; b++)
        for (int64_t i = 0; i < a.n_blocks; i++) {
            int64_t start = a.K - 1, end = 0;
            int32_t min_position = a.positions[b * a.N + a.block_start[i]], max_position = min_position;
            for (int64_t r = a.block_start[i]; r < a.block_start[i + 1]; r++) {
                min_position = std::min(min_position, a.positions[b * a.N + r]);
                max_position = std::max(max_position, a.positions[b * a.N + r]);
                for (int64_t j = 0; j < start; j++)
                    if (is_visible(a, b, r, j)) start = j;
                for (int64_t j = a.K - 1; j >= end; j--)
                    if (is_visible(a, b, r, j)) end = j + 1;
            }
            const int64_t index = b * a.n_blocks + i, needed = max_position - min_position + std::max<int64_t>(end - start, 1);
            a.first_key[index] = start;
            a.n_keys[index] = std::max<int64_t>(end - start, 1);
            a.n_distances[index] = std::min(a.R, (needed + 7) / 8 * 8);  // a multiple of 8, because products of whole vectors are faster
            a.first_distance[index] = std::min<int64_t>(a.n_tokens - max_position + start, a.R - a.n_distances[index]);
        }
}

}  // namespace

extern "C" {

void set_gemm(void* sgemm, void* dgemm) {
    gemm<float> = reinterpret_cast<Gemm<float>>(sgemm);
    gemm<double> = reinterpret_cast<Gemm<double>>(dgemm);
}

void schedule_blocks_float32(const AttentionArgs<float>* a) { schedule_blocks(*a); }  // the same for all types

#define EXPORT_ATTENTION(T, DTYPE)                                                                                                              \
    void attention_forward_##DTYPE(const AttentionArgs<T>* a) {                                                                                 \
        for_each_head(*a, [](HeadKernel<T>& kernel, int batch, int head) { kernel.forward(batch, head); });                                     \
    }                                                                                                                                           \
    void attention_backward_##DTYPE(const AttentionArgs<T>* a) {                                                                                \
        for_each_head(*a, [](HeadKernel<T>& kernel, int batch, int head) { kernel.backward(batch, head); });                                    \
    }

#define EXPORT_ELEMENTWISE(T, DTYPE)                                                                                                            \
    void gelu_##DTYPE(int64_t n, int64_t n_threads, const T* x, T* y) { gelu(n, n_threads, x, y); }                                             \
    void gelu_backward_##DTYPE(int64_t n, int64_t n_threads, const T* x, const T* d_y, T* d_x) { gelu_backward(n, n_threads, x, d_y, d_x); }    \
    void dropout_##DTYPE(int64_t n, int64_t n_threads, const T* x, int64_t seed, int64_t drop_threshold, double scale, T* y) {                  \
        dropout(n, n_threads, x, seed, drop_threshold, scale, y);                                                                               \
    }                                                                                                                                           \
    void cross_entropy_##DTYPE(int64_t n, int64_t n_threads, int64_t n_classes, const Compute<T>* bias, const int64_t* targets, T* logits,      \
                               Compute<T>* losses) {                                                                                            \
        cross_entropy(n, n_threads, n_classes, bias, targets, logits, losses);                                                                  \
    }

EXPORT_ATTENTION(float, float32)
EXPORT_ATTENTION(double, float64)
EXPORT_ATTENTION(BFloat16, bfloat16)
EXPORT_ELEMENTWISE(float, float32)
EXPORT_ELEMENTWISE(double, float64)
EXPORT_ELEMENTWISE(BFloat16, bfloat16)
}
