// What kernels/cpu.py, feedforward.py and dropout.py leave to compiled code on a processor, in fp32 and fp64. kernels/compiled.py
// compiles this file; kernels/cpu.py derives what attention computes here. Products of matrices are those of torch's own BLAS.
//
// One thread computes one head of one window, a block of rows at a time, so that a block's scores stay in its cache from product to
// softmax to product. No two threads add to the same place: a result has the same bits with any number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

const double NEVER = -1e30;  // the score of a key that is not seen

template <class T>
using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*, const T*, const int*, const T*,
                      const int*, const T*, T*, const int*);

template <class T>
Gemm<T> gemm = nullptr;

// A matrix by rows, `step` numbers from one row to the next.
template <class T>
struct Matrix {
    T* at;
    int step;
    bool turned = false;

    Matrix t() const { return {at, step, !turned}; }
};

// c (m, n) = a (m, k) b (k, n) + beta c. BLAS reads columns, so that it is asked for the product turned over.
template <class T>
void multiply(int m, int n, int k, Matrix<const T> a, Matrix<const T> b, T beta, Matrix<T> c) {
    const T one = 1;
    gemm<T>(b.turned ? "T" : "N", a.turned ? "T" : "N", &n, &m, &k, &one, b.at, &b.step, a.at, &a.step, &beta, c.at, &c.step);
}

template <class To, class From>
inline To same_bits(From x) {
    To y;
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&y, &x, sizeof(To));
    return y;
}

inline double exponential(double x) { return std::exp(x); }

// 2^n e^f with |f| <= ln(2) / 2, e^f by the polynomial 1 + f + c f^2 + ... to the fifth power whose largest error, 1 part in 10^7, is least.
// Compilers make vectors of it. What is beyond 60 counts as 60: no farther, lest what comes of it be denormal, with which processors are slow.
inline float exponential(float x) {
    x = std::min(std::max(x, -60.0f), 60.0f);
    const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the whole part now fills the lowest bits
    const float whole = shifted - 12582912.0f;
    const float f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln(2) in two parts
    float sum = 0.00831252505f;
    sum = sum * f + 0.0418901138f;
    sum = sum * f + 0.166671145f;
    sum = sum * f + 0.499992318f;
    sum = sum * f + 1.0f;
    sum = sum * f + 1.0f;
    return sum * same_bits<float>((same_bits<uint32_t>(shifted) << 23) + 0x3f800000u);
}

// Random numbers by counting: the k-th of a row, from two words of that row's own (Ellis's lowbias32, with a word between its rounds).
struct Row {
    uint32_t before, between;

    Row(uint64_t seed, uint64_t row) {  // splitmix64
        uint64_t x = seed + (row + 1) * 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x ^= x >> 31;
        before = uint32_t(x), between = uint32_t(x >> 32);
    }

    uint32_t operator()(uint32_t k) const {
        uint32_t x = k + before;
        x = (x ^ (x >> 16)) * 0x7feb352du ^ between;
        x = (x ^ (x >> 15)) * 0x846ca68bu;
        return x ^ (x >> 16);
    }
};

// Sets those of n numbers to 0 whose random number is below `taken`; the others grow.
template <class T>
void drop(Row random, uint32_t taken, T grown, int n, const T* from, T* to) {
#pragma omp simd
    for (int j = 0; j < n; j++) {
        const T more = from[j] * grown;
        to[j] = random(j) >= taken ? more : T(0);
    }
}

// Of kernels/cpu.py, field by field.
template <class T>
struct Attention {
    int64_t B, N, K, H, E, R, n_tokens, n_self_visible, reach, n_blocks, block_rows, threads, seed, taken;
    double scale, grown;
    const int32_t *query_rank, *key_rank, *row_segments, *key_segments, *positions, *direction;
    const int32_t* begins;  // (n_blocks + 1) first rows
    int32_t *first_key, *n_keys, *low, *width;  // (B, n_blocks)
    const T *query, *r_w_bias, *r_r_bias, *pos_key, *pos_offset, *r_s_bias, *segment_diff, *key, *value;
    T *out, *kept, *normalizer;
    const T* grad;
    T *d_query, *d_r_w_bias, *d_r_r_bias, *d_pos_key, *d_pos_offset, *d_r_s_bias, *d_segment_diff, *d_key, *d_value;
};

// One head of one window.
template <class T>
class Head {
  public:
    explicit Head(const Attention<T>& a)
        : a(a), E(a.E), step(a.H * a.E), taken(a.taken), grown(a.grown), content(a.block_rows * a.E), place(content.size()),
          d_content(a.grad ? content.size() : 0), d_place(d_content.size()), score(a.block_rows * a.K), d_score(a.grad ? score.size() : 0),
          used(a.taken ? d_score.size() : 0), by_distance(a.pos_key ? a.block_rows * a.R : 0), nothing(a.K), of_step(a.block_rows),
          largest(a.block_rows) {}

    void forward(int window, int head) {
        for (int i = 0; i < a.n_blocks; i++) {
            take(window, head, i);
            queries();
            scores();
            for (int r = 0; r < n; r++) {
                T* s = &score[int64_t(r) * k];
                const T normal = normalize(s, largest[r]);
                if (a.normalizer) a.normalizer[row_of_head(r)] = normal;
                if (a.kept) std::copy(s, s + k, a.kept + row_of_head(r) * a.K);
                if (a.taken) drop(random(r), taken, grown, k, s, s);
            }
            multiply<T>(n, E, k, {score.data(), k}, {keys(a.value), step}, 0, {rows(a.out), step});
        }
    }

    void backward(int window, int head) {
        const int64_t mine = (int64_t(window) * a.H + head) * E;
        for (int i = 0; i < a.n_blocks; i++) {
            take(window, head, i);
            queries();
            if (a.kept)
                for (int r = 0; r < n; r++) std::copy_n(a.kept + row_of_head(r) * a.K, k, &score[int64_t(r) * k]);
            else
                again();
            const T* weights = score.data();
            if (a.taken) {
                for (int r = 0; r < n; r++) drop(random(r), taken, grown, k, &score[int64_t(r) * k], &used[int64_t(r) * k]);
                weights = used.data();
            }
            multiply<T>(k, E, n, Matrix<const T>{weights, k}.t(), {rows(a.grad), step}, 1, {keys(a.d_value), step});
            multiply<T>(n, k, E, {rows(a.grad), step}, Matrix<const T>{keys(a.value), step}.t(), 0, {d_score.data(), k});
            for (int r = 0; r < n; r++) differentiate(r, weights + int64_t(r) * k);
            multiply<T>(n, E, k, {d_score.data(), k}, {keys(a.key), step}, 0, {d_content.data(), E});
            multiply<T>(k, E, n, Matrix<const T>{d_score.data(), k}.t(), {content.data(), E}, 1, {keys(a.d_key), step});
            if (a.pos_key) {
                multiply<T>(n, E, w, {by_distance.data(), w}, {distances(a.pos_key), step}, 0, {d_place.data(), E});
                multiply<T>(w, E, n, Matrix<const T>{by_distance.data(), w}.t(), {place.data(), E}, 1, {distances_of_window(), step});
            }
            for (int r = 0; r < n; r++) of_query(r, mine);
            if (a.pos_offset) of_offsets();
        }
    }

  private:
    const Attention<T>& a;
    const int E, step;
    const uint32_t taken;
    const T grown;
    int b, h, first, n, first_key, k, low, w, direction;
    std::vector<T> content, place, d_content, d_place, score, d_score, used, by_distance, nothing, of_step, largest;

    void take(int window, int head, int block) {
        const int64_t at = window * a.n_blocks + block;
        b = window, h = head, first = a.begins[block], n = a.begins[block + 1] - first;
        first_key = a.first_key[at], k = a.n_keys[at], low = a.low[at], w = a.width[at], direction = a.direction[b];
    }

    int64_t row(int r) const { return b * a.N + first + r; }
    int64_t row_of_head(int r) const { return (b * a.H + h) * a.N + first + r; }
    template <class P>
    P* rows(P* x) const { return x + (row(0) * a.H + h) * E; }
    template <class P>
    P* keys(P* x) const { return x + ((b * a.K + first_key) * a.H + h) * E; }
    template <class P>
    P* distances(P* x) const { return x + ((direction * a.R + low) * a.H + h) * E; }
    T* distances_of_window() const { return a.d_pos_key + ((b * a.R + low) * a.H + h) * E; }
    int own(int r) const { return a.positions[row(r)] + int(a.K - a.n_tokens) - first_key; }
    // where the block's first key stands among a row's distances
    int shift(int r) const { return int(a.n_tokens) - a.positions[row(r)] + first_key - low; }
    Row random(int r) const { return Row(a.seed, row_of_head(r)); }
    const T* of_head(const T* bias) const { return bias ? bias + h * E : nullptr; }

    // (query + bias) * scale, and its product with the step where the segments differ.
    void queries() {
        const T *r_w_bias = of_head(a.r_w_bias), *r_r_bias = of_head(a.r_r_bias), *r_s_bias = of_head(a.r_s_bias);
        const T scale = a.scale, *step_key = of_head(a.segment_diff);
        for (int r = 0; r < n; r++) {
            const T* query = rows(a.query) + int64_t(r) * step;
            for (int e = 0; e < E; e++) content[r * E + e] = (query[e] + (r_w_bias ? r_w_bias[e] : 0)) * scale;
            for (int e = 0; e < E; e++) place[r * E + e] = (query[e] + (r_r_bias ? r_r_bias[e] : 0)) * scale;
            T sum = 0;
            for (int e = 0; step_key && e < E; e++) sum += (query[e] + (r_s_bias ? r_s_bias[e] : 0)) * scale * step_key[e];
            of_step[r] = sum;
        }
    }

    // All terms, and NEVER where a row does not see a key; of the queries' products. And the largest of each row.
    void scores() {
        multiply<T>(n, k, E, {content.data(), E}, Matrix<const T>{keys(a.key), step}.t(), 0, {score.data(), k});
        if (a.pos_key) multiply<T>(n, w, E, {place.data(), E}, Matrix<const T>{distances(a.pos_key), step}.t(), 0, {by_distance.data(), w});
        for (int r = 0; r < n; r++) finish(r);
    }

    void finish(int r) {
        T* s = &score[int64_t(r) * k];
        const T* places = a.pos_key ? &by_distance[int64_t(r) * w + shift(r)] : nothing.data();
        const T t = of_step[r], scale = a.scale, never = NEVER;
        if (a.pos_offset) {
            const T* offsets = a.pos_offset + (direction * a.H + h) * a.R + low + shift(r);
#pragma omp simd
            for (int j = 0; j < k; j++) s[j] += offsets[j] * scale;
        }
        const int32_t rank = a.query_rank[row(r)], segment = a.row_segments[row(r)];
        const int32_t *ranks = a.key_rank + b * a.K + first_key, *segments = a.key_segments + b * a.K + first_key;
        const int mine = own(r), from = a.reach < 0 ? 0 : std::clamp(mine - int(a.reach), 0, k);
        const bool sees_own = first + r < a.n_self_visible;
        const T at_own = sees_own ? s[mine] + places[mine] + (segments[mine] != segment ? t : 0) : 0;
        std::fill(s, s + from, never);
        T most = sees_own ? at_own : never;
#pragma omp simd reduction(max : most)
        for (int j = from; j < k; j++) {
            const T x = s[j] + places[j] + (segments[j] != segment ? t : T(0));
            s[j] = ranks[j] < rank ? x : never;
            most = s[j] > most ? s[j] : most;
        }
        if (sees_own) s[mine] = at_own;
        largest[r] = most;
    }

    // Scores become probabilities, or 0 where nothing is seen. Returns what their exponents were divided by, as a logarithm.
    T normalize(T* s, T most) const {
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < k; j++) {
            const T e = s[j] <= T(NEVER / 2) ? T(0) : exponential(s[j] - most);  // what is no number stays none
            s[j] = e;
            sum += e;
        }
        const T share = sum == 0 ? 0 : 1 / sum;
#pragma omp simd
        for (int j = 0; j < k; j++) s[j] *= share;
        return most + std::log(sum);
    }

    // Probabilities once more, where they were not kept.
    void again() {
        scores();
        for (int r = 0; r < n; r++) {
            T* s = &score[int64_t(r) * k];
            const T normal = a.normalizer[row_of_head(r)];
#pragma omp simd
            for (int j = 0; j < k; j++) s[j] = s[j] <= T(NEVER / 2) ? T(0) : exponential(s[j] - normal);
        }
    }

    // The gradient of a row's scores, in place of that of its weights; by distance too.
    void differentiate(int r, const T* weights) {
        const T *p = &score[int64_t(r) * k], *grad = rows(a.grad) + int64_t(r) * step, *out = rows(a.out) + int64_t(r) * step;
        T *d = &d_score[int64_t(r) * k], total = 0, differing = 0;
#pragma omp simd reduction(+ : total)
        for (int e = 0; e < E; e++) total += grad[e] * out[e];
        const int32_t segment = a.row_segments[row(r)], *segments = a.key_segments + b * a.K + first_key;
#pragma omp simd reduction(+ : differing)
        for (int j = 0; j < k; j++) {
            d[j] = weights[j] * d[j] - p[j] * total;
            differing += segments[j] != segment ? d[j] : T(0);
        }
        of_step[r] = differing;
        if (!a.pos_key) return;
        T* moved = &by_distance[int64_t(r) * w];
        const int begin = shift(r);
        std::fill(moved, moved + begin, T(0));
        std::copy(d, d + k, moved + begin);
        std::fill(moved + begin + k, moved + w, T(0));
    }

    // The gradient of a row's query, and what it adds to those of biases and step.
    void of_query(int r, int64_t mine) {
        const T *query = rows(a.query) + int64_t(r) * step, *c = &d_content[r * E], *p = &d_place[r * E];
        const T *step_key = of_head(a.segment_diff), *r_s_bias = of_head(a.r_s_bias), scale = a.scale, differing = of_step[r];
        T* d = rows(a.d_query) + int64_t(r) * step;
        for (int e = 0; e < E; e++) d[e] = c[e] * scale;
        if (a.r_w_bias)
            for (int e = 0; e < E; e++) a.d_r_w_bias[mine + e] += c[e] * scale;
        if (a.pos_key)
            for (int e = 0; e < E; e++) d[e] += p[e] * scale;
        if (a.r_r_bias)
            for (int e = 0; e < E; e++) a.d_r_r_bias[mine + e] += p[e] * scale;
        if (!step_key) return;
        for (int e = 0; e < E; e++) {
            d[e] += differing * step_key[e] * scale;
            a.d_segment_diff[mine + e] += differing * (query[e] + (r_s_bias ? r_s_bias[e] : 0)) * scale;
            if (r_s_bias) a.d_r_s_bias[mine + e] += differing * step_key[e] * scale;
        }
    }

    void of_offsets() {
        T* sums = a.d_pos_offset + (b * a.H + h) * a.R + low;
        for (int r = 0; r < n; r++)
            for (int j = 0; j < w; j++) sums[j] += by_distance[int64_t(r) * w + j] * T(a.scale);
    }
};

template <class T, class Do>
void each_head(const Attention<T>& a, Do compute) {
#pragma omp parallel num_threads(a.threads)
    {
        Head<T> head(a);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < a.B * a.H; i++) compute(head, int(i / a.H), int(i % a.H));
    }
}

const int64_t PIECE = 4096;  // elements for which a thread is sent

template <class Do>
void each_piece(int64_t n, int64_t threads, Do compute) {
    const int64_t pieces = (n + PIECE - 1) / PIECE;
#pragma omp parallel for num_threads(std::min(threads, pieces / 8 + 1))
    for (int64_t i = 0; i < pieces; i++) compute(i, i * PIECE, std::min(n, (i + 1) * PIECE));
}

const double LINEAR = 1.5957691216057308, CUBIC = 0.044715 * LINEAR;  // 2 sqrt(2 / pi)

template <class T>
inline T sigmoid_of_gelu(T x) {
    return 1 / (1 + exponential(-x * (T(LINEAR) + T(CUBIC) * x * x)));
}

template <class T>
void gelu(int64_t n, int64_t threads, const T* x, T* y) {
    each_piece(n, threads, [=](int64_t, int64_t from, int64_t to) {
#pragma omp simd
        for (int64_t i = from; i < to; i++) y[i] = x[i] * sigmoid_of_gelu(x[i]);
    });
}

template <class T>
void gelu_backward(int64_t n, int64_t threads, const T* x, const T* grad, T* d) {
    each_piece(n, threads, [=](int64_t, int64_t from, int64_t to) {
#pragma omp simd
        for (int64_t i = from; i < to; i++) {
            const T s = sigmoid_of_gelu(x[i]);
            d[i] = grad[i] * (s + s * (1 - s) * x[i] * (T(LINEAR) + 3 * T(CUBIC) * x[i] * x[i]));
        }
    });
}

template <class T>
void dropout(int64_t n, int64_t threads, const T* x, int64_t seed, int64_t taken, double grown, T* y) {
    each_piece(n, threads, [=](int64_t piece, int64_t from, int64_t to) {
        drop(Row(seed, piece), uint32_t(taken), T(grown), int(to - from), x + from, y + from);
    });
}

template <class T>
bool sees(const Attention<T>& a, int64_t b, int64_t r, int64_t j) {
    const int64_t own = a.positions[b * a.N + r] + a.K - a.n_tokens;
    const bool seen = a.key_rank[b * a.K + j] < a.query_rank[b * a.N + r] || (r < a.n_self_visible && j == own);
    return seen && (a.reach < 0 || own - j <= a.reach);
}

// Between which keys are all that the rows of each block see, one at least, and which distances that takes.
template <class T>
void plan(const Attention<T>& a) {
    for (int64_t b = 0; b < a.B; b++)
        for (int64_t i = 0; i < a.n_blocks; i++) {
            int64_t from = a.K - 1, to = 0;
            int32_t least = a.positions[b * a.N + a.begins[i]], most = least;
            for (int64_t r = a.begins[i]; r < a.begins[i + 1]; r++) {
                least = std::min(least, a.positions[b * a.N + r]), most = std::max(most, a.positions[b * a.N + r]);
                for (int64_t j = 0; j < from; j++)
                    if (sees(a, b, r, j)) from = j;
                for (int64_t j = a.K - 1; j >= to; j--)
                    if (sees(a, b, r, j)) to = j + 1;
            }
            const int64_t at = b * a.n_blocks + i, needed = most - least + std::max<int64_t>(to - from, 1);
            a.first_key[at] = from;
            a.n_keys[at] = std::max<int64_t>(to - from, 1);
            a.width[at] = std::min(a.R, (needed + 7) / 8 * 8);  // rows of whole vectors, whose products are faster
            a.low[at] = std::min<int64_t>(a.n_tokens - most + from, a.R - a.width[at]);
        }
}

}  // namespace

extern "C" {

void use_products(void* of_floats, void* of_doubles) {
    gemm<float> = reinterpret_cast<Gemm<float>>(of_floats);
    gemm<double> = reinterpret_cast<Gemm<double>>(of_doubles);
}

#define OF_TYPE(T, NAME)                                                                                                                        \
    void plan_##NAME(const Attention<T>* a) { plan(*a); }                                                                                       \
    void attend_##NAME(const Attention<T>* a) {                                                                                                 \
        each_head(*a, [](Head<T>& head, int window, int h) { head.forward(window, h); });                                                       \
    }                                                                                                                                           \
    void attend_backward_##NAME(const Attention<T>* a) {                                                                                        \
        each_head(*a, [](Head<T>& head, int window, int h) { head.backward(window, h); });                                                      \
    }                                                                                                                                           \
    void gelu_##NAME(int64_t n, int64_t threads, const T* x, T* y) { gelu(n, threads, x, y); }                                                  \
    void gelu_backward_##NAME(int64_t n, int64_t threads, const T* x, const T* grad, T* d) { gelu_backward(n, threads, x, grad, d); }           \
    void dropout_##NAME(int64_t n, int64_t threads, const T* x, int64_t seed, int64_t taken, double grown, T* y) {                              \
        dropout(n, threads, x, seed, taken, grown, y);                                                                                          \
    }

OF_TYPE(float, float32)
OF_TYPE(double, float64)
}
