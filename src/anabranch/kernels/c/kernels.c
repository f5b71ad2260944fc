/* Kernels of the CPU for decode steps: few rows, fp32, row-major and contiguous unless a stride is given. Matrices may
   be in bf16: their numbers are widened to fp32, exactly.

   A result depends on its own row alone, to the bit: every product of a row with a weight's row is summed in the same
   order however many rows there are, however many threads compute them, and whether the matrix is fp32 or bf16 (but
   for matrix units, which multiply by matrices in bf16 alone).

   T tokens, D inputs, F outputs, K experts per token, E experts, I expert width, R requests, H query heads, G key-value
   heads, N pairs of a token and an expert. */

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__AVX__) && !defined(__AVX512F__)
#define COLUMNS 2 /* rows of x in a tile: 16 registers hold no more */
#else
#define COLUMNS 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
/* A vector of numbers in bf16. */
INLINE vec widened(const uint16_t *p) {
#if defined(__aarch64__)
    return (vec)vshll_n_u16(vld1_u16(p), 16);
#elif defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#elif defined(__AVX__)
    __m128i both = _mm_loadu_si128((const __m128i *)p), zero = _mm_setzero_si128();
    return (vec)_mm256_set_m128i(_mm_unpackhi_epi16(zero, both), _mm_unpacklo_epi16(zero, both));
#elif defined(__x86_64__)
    return (vec)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p));
#else
    uint32_t words[LANES];
    for (int i = 0; i < LANES; i++) words[i] = (uint32_t)p[i] << 16;
    return load((const float *)words);
#endif
}
/* Two of them. */
INLINE void widen(const uint16_t *p, vec *low, vec *high) {
#if defined(__aarch64__) /* which does two zips at a time, and one shift */
    uint16x8_t both = vld1q_u16(p), zero = vdupq_n_u16(0);
    *low = (vec)vzip1q_u16(zero, both), *high = (vec)vzip2q_u16(zero, both);
#else
    *low = widened(p), *high = widened(p + LANES);
#endif
}
INLINE float wide(uint16_t number) {
    uint32_t word = (uint32_t)number << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}
INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec choose(ivec yes, vec a, vec b) { return (vec)((yes & (ivec)a) | (~yes & (ivec)b)); }
/* Rounded once where the machine can: a compiler may do so in one copy of a loop and not in another. */
INLINE float plus_product(float sum, float a, float b) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, sum);
#else
    return sum + a * b;
#endif
}
INLINE float total(vec v) {
    float part[LANES]; /* taken one by one: a copy of v's memory would keep the sums of a tile out of registers */
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) part[i] = v[i];
#pragma GCC unroll 4
    for (int width = LANES / 2; width; width /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
/* Halves (quarters ...) of vectors or of their parts are added, as in `total`: what is left of a, then what is of b. */
#if LANES == 16
INLINE vec add_8(vec a, vec b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
INLINE vec add_4(vec a, vec b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#define EACH(i, j, k, l) i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, k + 8, l + 8, i + 12, j + 12, k + 12, l + 12
#define QUARTER(v, p) add_4(add_8(v[p], v[p + 4]), add_8(v[p + 8], v[p + 12]))
#elif LANES == 8
INLINE vec add_4(vec a, vec b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
#define EACH(i, j, k, l) i, j, k, l, i + 4, j + 4, k + 4, l + 4
#define QUARTER(v, p) add_4(v[p], v[p + 4])
#else
#define EACH(i, j, k, l) i, j, k, l
#define QUARTER(v, p) v[p]
#endif
INLINE vec add_2(vec a, vec b) {
    return SHUFFLE(a, b, EACH(0, 1, LANES, LANES + 1)) + SHUFFLE(a, b, EACH(2, 3, LANES + 2, LANES + 3));
}
INLINE vec add_1(vec a, vec b) {
    return SHUFFLE(a, b, EACH(0, 2, LANES, LANES + 2)) + SHUFFLE(a, b, EACH(1, 3, LANES + 1, LANES + 3));
}
#define UP(n) (((n) + LANES - 1) / LANES * LANES)
/* `total` of each of some vectors; those after them, UP(count) together, may be anything. */
INLINE void collect(float *result, const vec *v, int count) {
    if (count == 1) {
        *result = total(*v);
        return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i += LANES)
        store(result + i, add_1(add_2(QUARTER((v + i), 0), QUARTER((v + i), 1)),
                                add_2(QUARTER((v + i), 2), QUARTER((v + i), 3))));
}

/* -- threads ------------------------------------------------------------------------------------------------------- */

/* Chunks of a job are claimed one by one, by the caller too: a worker that the system does not run delays nobody. */

typedef void (*Work)(void *job, long chunk);

#define MAX_WORKERS 63
#define SPINS 4000 /* about 50 us: the next job of a step comes sooner than a sleeping thread wakes up */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_flag busy;
    atomic_uint number; /* of the job */
    atomic_ullong next; /* (number << 32) + the next chunk */
    atomic_long done;
    Work work;
    void *job;
    long chunks;
    int workers;
    pid_t owner;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .busy = ATOMIC_FLAG_INIT};

INLINE void pause_briefly(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void run_chunks(unsigned number, Work work, void *job, long chunks) {
    unsigned long long first = (unsigned long long)number << 32;
    for (;;) {
        unsigned long long mine = atomic_load(&pool.next);
        if (mine - first >= (unsigned long long)chunks) return; /* no more, or another job's */
        if (!atomic_compare_exchange_weak(&pool.next, &mine, mine + 1)) continue;
        work(job, (long)(mine - first));
        atomic_fetch_add(&pool.done, 1);
    }
}

static void *worker(void *unused) {
    unsigned seen = 0;
    (void)unused;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.number) == seen; i++) pause_briefly();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.number) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.number);
        Work work = pool.work;
        void *job = pool.job;
        long chunks = pool.chunks;
        pthread_mutex_unlock(&pool.lock);
        run_chunks(seen, work, job, chunks);
    }
    return NULL;
}

static void start_workers(int wanted) {
    if (pool.owner != getpid()) { /* the first call, or a forked process, which has no workers */
        pthread_mutex_init(&pool.lock, NULL);
        pthread_cond_init(&pool.wake, NULL);
        pool.workers = 0;
        pool.owner = getpid();
    }
    for (; pool.workers < wanted && pool.workers < MAX_WORKERS; pool.workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL)) return;
        pthread_detach(thread);
    }
}

static void parallel(Work work, void *job, long chunks, int threads) {
    if (threads <= 1 || chunks <= 1 || atomic_flag_test_and_set(&pool.busy)) {
        for (long chunk = 0; chunk < chunks; chunk++) work(job, chunk);
        return;
    }
    start_workers(threads - 1);
    pthread_mutex_lock(&pool.lock);
    unsigned number = atomic_load(&pool.number) + 1;
    pool.work = work, pool.job = job, pool.chunks = chunks;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.next, (unsigned long long)number << 32);
    atomic_store(&pool.number, number);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    run_chunks(number, work, job, chunks);
    for (int i = 0; atomic_load(&pool.done) < chunks; i++) i < SPINS ? pause_briefly() : (void)sched_yield();
    atomic_flag_clear(&pool.busy);
}

/* -- products ------------------------------------------------------------------------------------------------------ */

/* Some rows of a matrix times some rows of x. */
INLINE void tile(int rows, int columns, int bf16, const void *matrix, const float *const *x, float *const *y,
                 const float *bias, long f, long D) {
    const float *w = (const float *)matrix + f * D;
    const uint16_t *half = (const uint16_t *)matrix + f * D;
    vec sum[UP(16)]; /* of column c and row r: c * rows + r */
    long d = 0;
#pragma GCC unroll 16
    for (int i = 0; i < UP(16); i++) sum[i] = (vec){0};
    if (bf16)
        for (; d + 2 * LANES <= D; d += 2 * LANES) {
            vec a[COLUMNS], b[COLUMNS];
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) a[c] = load(x[c] + d), b[c] = load(x[c] + d + LANES);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vec low, high;
                widen(half + r * D + d, &low, &high);
                __builtin_prefetch(half + (r + rows) * D + d); /* of the next tile */
#pragma GCC unroll 4
                for (int c = 0; c < columns; c++) sum[c * rows + r] += low * a[c], sum[c * rows + r] += high * b[c];
            }
        }
    else
        for (; d + LANES <= D; d += LANES) {
            vec part[COLUMNS];
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) part[c] = load(x[c] + d);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vec row = load(w + r * D + d);
                if (columns == 1) __builtin_prefetch(w + (r + rows) * D + d); /* of the next tile */
#pragma GCC unroll 4
                for (int c = 0; c < columns; c++) sum[c * rows + r] += row * part[c];
            }
        }
    if (bf16 && d + LANES <= D) { /* a vector that is left */
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) sum[c * rows + r] += widened(half + r * D + d) * load(x[c] + d);
        d += LANES;
    }
    float result[UP(16)];
    collect(result, sum, rows * columns);
    for (; d < D; d++)
        for (int n = 0; n < rows * columns; n++) {
            long i = n % rows * D + d;
            result[n] = plus_product(result[n], bf16 ? wide(half[i]) : w[i], x[n / rows][d]);
        }
    for (int c = 0; c < columns; c++)
        if (bias)
            for (int r = 0; r < rows; r++) y[c][f + r] = result[c * rows + r] + bias[f + r];
        else
            memcpy(y[c] + f, result + c * rows, sizeof(float) * rows);
}

#define MOST (LANES > 8 ? LANES : 8) /* rows of a tile for one row of x */
#define EVERY_ROW(rows, columns) \
    for (; f + rows <= end; f += rows) tile(rows, columns, bf16, w, x, y, bias, f, D)

/* y[t][f] = w[f] . x[t] + bias[f] for f from begin to end. */
INLINE void multiply(int bf16, const void *w, const float *bias, const float *const *x, float *const *y, long T,
                     long begin, long end, long D) {
    long f = begin;
    if (T == 1) EVERY_ROW(MOST, 1);
    if (T == 2) EVERY_ROW(2 * COLUMNS, 2);
    for (; f + 4 <= end; f += 4) {
        long t = 0;
        for (; t + COLUMNS <= T; t += COLUMNS) tile(4, COLUMNS, bf16, w, x + t, y + t, bias, f, D);
        for (; COLUMNS > 3 && t + 3 <= T; t += 3) tile(4, 3, bf16, w, x + t, y + t, bias, f, D);
        for (; t < T; t++) tile(4, 1, bf16, w, x + t, y + t, bias, f, D);
    }
    for (; f < end; f++)
        for (long t = 0; t < T; t++) tile(1, 1, bf16, w, x + t, y + t, bias, f, D);
}

static void products(const float *w, const float *bias, const float *const *x, float *const *y, long T, long begin,
                     long end, long D) {
    multiply(0, w, bias, x, y, T, begin, end, D);
}

/* As `products`, of a matrix in bf16: for many rows of x, a few of its rows at a time are widened for all of them. */
static void bf16_products(const uint16_t *w, const float *bias, const float *const *x, float *const *y, long T,
                          long begin, long end, long D) {
    if (T <= COLUMNS) return multiply(1, w, bias, x, y, T, begin, end, D);
    float rows[4 * D], *places[T];
    for (long f = begin, count; f < end; f += count) {
        count = f + 4 <= end ? 4 : end - f;
        const uint16_t *from = w + f * D;
        long i = 0;
        for (; i + 2 * LANES <= count * D; i += 2 * LANES) {
            vec low, high;
            widen(from + i, &low, &high);
            __builtin_prefetch(from + count * D + i);
            store(rows + i, low), store(rows + i + LANES, high);
        }
        for (; i < count * D; i++) rows[i] = wide(from[i]);
        for (long t = 0; t < T; t++) places[t] = y[t] + f;
        products(rows, bias ? bias + f : NULL, x, places, T, 0, count, D);
    }
}

#define ROWS 64
#define FEW 200000 /* products that are not worth a second thread */

/* Outputs of a chunk, and how many chunks. */
static long chunk_size(long T, long F, long D, int threads) {
    if (threads <= 1 || T * F * D < FEW) return F;
    long size = (F / (4 * threads) + 7) / 8 * 8;
    return size ? size : 8;
}

/* -- matrix units of x86 (AMX) ------------------------------------------------------------------------------------- */

/* They multiply numbers in bf16 and sum in fp32. A number in fp32 is the sum of three in bf16, exactly: its first, its
   middle and its last bits. So x times a matrix in bf16 is three products, which are added: as exact as a sum in fp32,
   and a row's bits do not depend on other rows, but they are not those of the products above.

   A tile of the matrix has 16 of its rows and 32 inputs. Of x there is, for 32 inputs: a pair of inputs in each of 16
   lines, and in a line a column for each row of x; first bits, then middle, then last. Up to FEW_ROWS rows of x have
   all of these in one tile, others in three of 16 rows. */

#define FEW_ROWS 5
#define UNIT 16 /* rows of a tile */

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && LANES == 16 && defined(SYS_arch_prctl)
static int use_units = -1; /* unknown */

/* Whether there are matrix units that this process may use: Linux asks for a request, once. -1: find out; 0: do not use
   them; 1: do, if they are there. */
int units(int wanted) {
    static int there = -1;
    if (there < 0) there = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18L /* XTILEDATA */) == 0;
    if (wanted >= 0 || use_units < 0) use_units = there && wanted;
    return use_units;
}

/* Rows of x in a block, and bytes of the parts of T rows. */
INLINE long block_rows(long T) { return T < UNIT ? T : UNIT; }
INLINE long split_size(long T, long D) { return (T + UNIT - 1) / UNIT * block_rows(T) * 6 * D; }

/* Rows of the matrix in a chunk, at most `size`: for many rows of x they stay in a cache. */
INLINE long unit_rows(long size, long T, long D) {
    long most = T > UNIT && 1 << 17 < size * D ? (1 << 17) / D : size;
    return (most + 2 * UNIT - 1) / (2 * UNIT) * (2 * UNIT);
}

INLINE ivec pick(ivec yes, ivec a, ivec b) { return (yes & a) | (~yes & b); }
/* 16 vectors of 16, transposed. */
INLINE void transpose(vec *v) {
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int step = 8; step; step /= 2) {
        ivec upper = (lane & step) != 0, from_low = pick(upper, lane + 16 - step, lane);
        ivec from_high = pick(upper, lane + 16, lane + step);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (!(i & step)) {
                vec a = v[i], b = v[i + step];
                v[i] = (vec)_mm512_permutex2var_ps((__m512)a, (__m512i)from_low, (__m512)b);
                v[i + step] = (vec)_mm512_permutex2var_ps((__m512)a, (__m512i)from_high, (__m512)b);
            }
    }
}

/* A block of rows of x as its parts. */
static void split(uint32_t *parts, const float *const *x, long T, long columns, long D) {
    const __m512i top = _mm512_set1_epi32((int)0xffff0000), exponent = _mm512_set1_epi32(0x7f800000);
    long few = T <= FEW_ROWS && T == columns, next = few ? T : UNIT, width = few ? 3 * T : columns;
    __mmask16 line = (__mmask16)((1u << width) - 1);
    vec pairs[3 * UNIT]; /* of the first bits of all rows, of the middle, of the last */
    memset(pairs, 0, sizeof pairs);
    for (long d = 0; d < D; d += 32) {
        for (long t = 0; t < T; t++) {
            __m256i half[2][3];
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                __m512i bits = _mm512_loadu_si512(x[t] + d + i * 16), first = _mm512_and_si512(bits, top);
                __mmask16 finite = _mm512_cmpneq_epi32_mask(_mm512_and_si512(bits, exponent), exponent);
                __mmask16 nan = _mm512_cmp_ps_mask((__m512)bits, (__m512)bits, _CMP_UNORD_Q);
                __m512 rest = _mm512_maskz_sub_ps(finite, (__m512)bits, (__m512)first);
                __m512i middle = _mm512_and_si512((__m512i)rest, top);
                __m512i last = (__m512i)_mm512_sub_ps(rest, (__m512)middle);
                first = _mm512_mask_mov_epi32(first, nan, _mm512_set1_epi32(0x7fc00000));
                half[i][0] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(first, 16));
                half[i][1] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(middle, 16));
                half[i][2] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(last, 16));
            }
#pragma GCC unroll 3
            for (int part = 0; part < 3; part++)
                pairs[part * next + t] =
                    (vec)_mm512_inserti64x4(_mm512_castsi256_si512(half[0][part]), half[1][part], 1);
        }
        for (int tile = 0; tile < (few ? 1 : 3); tile++) {
            vec lines[UNIT];
            memcpy(lines, pairs + tile * UNIT, sizeof lines);
            transpose(lines);
#pragma GCC unroll 16
            for (int i = 0; i < UNIT; i++, parts += width) _mm512_mask_storeu_ps(parts, line, (__m512)lines[i]);
        }
    }
}

#define BARRIER __asm__ volatile("" ::: "memory") /* compilers know not which memory instructions for tiles touch */

typedef struct {
    uint8_t palette, start, zero[14];
    uint16_t bytes[16]; /* of a line */
    uint8_t lines[16];
} __attribute__((aligned(64))) Tiles;

/* Tiles from 0 to 5 are sums, 6 is of the matrix, 7 of x. */
static void set_tiles(long columns) {
    Tiles tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.lines[i] = UNIT, tiles.bytes[i] = i == 6 ? 64 : 4 * columns;
    BARRIER;
    _tile_loadconfig(&tiles);
}

/* Sums of 16 rows of the matrix, of which `count` are wanted, into y. */
INLINE void put_few(float *const *y, const float *sum, const float *bias, long f, int count, long T) {
    for (long t = 0; t < T; t++)
        for (int r = 0; r < count; r++) {
            const float *line = sum + r * 3 * T + t;
            float result = line[0] + (line[T] + line[2 * T]);
            y[t][f + r] = bias ? result + bias[f + r] : result;
        }
}
INLINE void put(float *const *y, const float *sum, const float *bias, long f, int count, long T, long columns) {
    vec row[16];
    __mmask16 most = (__mmask16)((1u << columns) - 1), wanted = (__mmask16)((1u << count) - 1);
#pragma GCC unroll 16
    for (int r = 0; r < UNIT; r++) {
        const float *line = sum + r * columns;
        __m512 small = _mm512_add_ps(_mm512_maskz_loadu_ps(most, line + UNIT * columns),
                                     _mm512_maskz_loadu_ps(most, line + 2 * UNIT * columns));
        row[r] = (vec)_mm512_add_ps(_mm512_maskz_loadu_ps(most, line), small);
    }
    transpose(row);
    __m512 offset = bias ? _mm512_maskz_loadu_ps(wanted, bias + f) : _mm512_setzero_ps();
    for (long t = 0; t < T; t++) {
        __m512 result = bias ? _mm512_add_ps((__m512)row[t], offset) : (__m512)row[t];
        _mm512_mask_storeu_ps(y[t] + f, wanted, result);
    }
}

#define ZERO(tile) ({ _tile_zero(tile); })
#define LOAD(tile, from, stride) ({ _tile_loadd(tile, from, stride); })
#define MULTIPLY(sum, a, b) ({ _tile_dpbf16ps(sum, a, b); })
#define STORE(tile, to, stride) ({ _tile_stored(tile, to, stride); })

/* y = x times rows of the matrix from begin to end, for x of T rows in parts; as `products` otherwise. */
static void unit_products(const uint16_t *w, const float *bias, const uint32_t *parts, float *const *y, long T,
                          long begin, long end, long D) {
    int few = T <= FEW_ROWS;
    long columns = block_rows(T), width = few ? 3 * columns : columns;
    float sum[6 * UNIT * UNIT] __attribute__((aligned(64)));
    uint16_t copy[end % UNIT ? UNIT * D : 1]; /* of the last rows, with others after them */
    set_tiles(width);
    for (long t = 0; t < T; t += UNIT, parts += 3 * D / 2 * columns) {
        long rows = T - t < UNIT ? T - t : UNIT;
        for (long f = begin, done; f < end; f += done) {
            const uint16_t *m = w + f * D;
            long stride = 2 * D, left = end - f, line = 4 * width;
            if (left < UNIT) memcpy(copy, m, sizeof *m * left * D), m = copy;
            BARRIER;
            if (few) {
                ZERO(0);
                for (long d = 0; d < D; d += 32) {
                    LOAD(7, parts + d / 2 * width, line);
                    LOAD(6, m + d, stride), MULTIPLY(0, 6, 7);
                    for (int r = 0; r < UNIT; r++) __builtin_prefetch(m + (UNIT + r) * D + d, 0, 2);
                }
                STORE(0, sum, line);
                done = UNIT;
            } else {
                int two = T > UNIT && left >= 2 * UNIT;
                ZERO(0), ZERO(1), ZERO(2), ZERO(3), ZERO(4), ZERO(5);
                for (long d = 0; d < D; d += 32) {
                    const uint32_t *p = parts + d / 32 * 3 * UNIT * columns;
                    LOAD(6, m + d, stride);
                    LOAD(7, p, line), MULTIPLY(0, 6, 7);
                    LOAD(7, p + UNIT * columns, line), MULTIPLY(1, 6, 7);
                    LOAD(7, p + 2 * UNIT * columns, line), MULTIPLY(2, 6, 7);
                    if (T <= UNIT)
                        for (int r = 0; r < UNIT; r++) __builtin_prefetch(m + (UNIT + r) * D + d, 0, 2);
                    if (!two) continue;
                    LOAD(6, m + d + 16 * D, stride);
                    LOAD(7, p, line), MULTIPLY(3, 6, 7);
                    LOAD(7, p + UNIT * columns, line), MULTIPLY(4, 6, 7);
                    LOAD(7, p + 2 * UNIT * columns, line), MULTIPLY(5, 6, 7);
                }
                STORE(0, sum, line), STORE(1, sum + UNIT * columns, line);
                STORE(2, sum + 2 * UNIT * columns, line), STORE(3, sum + 3 * UNIT * columns, line);
                STORE(4, sum + 4 * UNIT * columns, line), STORE(5, sum + 5 * UNIT * columns, line);
                done = two ? 2 * UNIT : UNIT;
            }
            BARRIER;
            for (long r = 0; r < done && f + r < end; r += UNIT) {
                int count = left - r < UNIT ? (int)(left - r) : UNIT;
                if (few)
                    put_few(y + t, sum + r * width, bias, f + r, count, rows);
                else
                    put(y + t, sum + r * 3 * columns, bias, f + r, count, rows, columns);
            }
        }
    }
    _tile_release();
}
#else
int units(int wanted) { return 0; }
INLINE long block_rows(long T) { return T; }
INLINE long split_size(long T, long D) { return 0; }
INLINE long unit_rows(long size, long T, long D) { return size; }
INLINE void split(uint32_t *parts, const float *const *x, long T, long columns, long D) {}
INLINE void unit_products(const uint16_t *w, const float *bias, const uint32_t *parts, float *const *y, long T,
                          long begin, long end, long D) {}
#endif

#define MOST_SPLIT 512 /* rows of x, for whose parts there is memory at a time */

/* -- linear -------------------------------------------------------------------------------------------------------- */

typedef struct {
    const void *w;
    const float *bias, *const *x;
    float *const *y;
    uint32_t *parts; /* of x, for matrix units */
    long T, F, D, size, bf16;
} Linear;

static void split_chunk(void *job, long chunk) {
    Linear *j = job;
    long t = chunk * UNIT, rows = j->T - t < UNIT ? j->T - t : UNIT;
    split(j->parts + t * 3 * j->D / 2, j->x + t, rows, block_rows(j->T), j->D);
}

static void linear_chunk(void *job, long chunk) {
    Linear *j = job;
    long begin = chunk * j->size, end = begin + j->size, last = end < j->F ? end : j->F;
    if (j->parts) return unit_products(j->w, j->bias, j->parts, j->y, j->T, begin, last, j->D);
    for (long t = 0; t < j->T; t += ROWS) { /* rows that stay in a cache while weights go by */
        long count = t + ROWS < j->T ? ROWS : j->T - t;
        if (j->bf16)
            bf16_products(j->w, j->bias, j->x + t, j->y + t, count, begin, last, j->D);
        else
            products(j->w, j->bias, j->x + t, j->y + t, count, begin, last, j->D);
    }
}

static void some_rows(float *y, const float *x, const void *w, const float *bias, long T, long F, long D, int bf16,
                      int threads, int in_units) {
    const float *rows[T];
    float *results[T];
    for (long t = 0; t < T; t++) rows[t] = x + t * D, results[t] = y + t * F;
    Linear job = {w, bias, rows, results, NULL, T, F, D, chunk_size(T, F, D, threads), bf16};
    if (in_units) {
        job.parts = aligned_alloc(64, split_size(T, D));
        job.size = unit_rows(job.size, T, D);
        parallel(split_chunk, &job, (T + UNIT - 1) / UNIT, T * D < FEW / 16 ? 1 : threads);
    }
    parallel(linear_chunk, &job, (F + job.size - 1) / job.size, threads);
    free(job.parts);
}

void linear(float *y, const float *x, const void *w, const float *bias, long T, long F, long D, int bf16,
            int threads) {
    int in_units = bf16 && D % 32 == 0 && units(-1);
    long most = in_units ? MOST_SPLIT : T;
    for (long t = 0; t < T; t += most)
        some_rows(y + t * F, x + t * D, w, bias, T - t < most ? T - t : most, F, D, bf16, threads, in_units);
}

/* -- rows by themselves -------------------------------------------------------------------------------------------- */

INLINE vec exponential(vec x) {
    x = choose(x > 88.0f, all(88.0f), choose(x < -87.0f, all(-87.0f), x)); /* NaN stays */
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;                /* rounded */
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = all(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return y * (vec)power;
}

INLINE void silu_times(float *y, const float *gate, const float *up, long width) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        vec g = load(gate + i);
        store(y + i, g / (1.0f + exponential(-g)) * load(up + i));
    }
    for (; i < width; i++) y[i] = gate[i] / (1.0f + total(exponential(all(-gate[i]))) / LANES) * up[i];
}

void gated_silu(float *y, const float *x, long T, long I) {
    for (long t = 0; t < T; t++) silu_times(y + t * I, x + 2 * t * I, x + (2 * t + 1) * I, I);
}

void add_gated(float *y, const float *x, const float *gated, const float *gate, long T, long D) {
    for (long t = 0; t < T; t++) {
        float factor = 1.0f / (1.0f + expf(-gate[t]));
        for (long d = t * D; d < (t + 1) * D; d++) y[d] = x[d] + factor * gated[d];
    }
}

INLINE float norm_factor(const float *x, long D, float eps) {
    vec sum = {0};
    long d = 0;
    for (; d + LANES <= D; d += LANES) sum += load(x + d) * load(x + d);
    float s = total(sum);
    for (; d < D; d++) s += x[d] * x[d];
    return 1.0f / sqrtf(s / D + eps);
}

INLINE void normalize(float *y, const float *x, const float *weight, long D, float eps) {
    float factor = norm_factor(x, D, eps);
    if (weight)
        for (long d = 0; d < D; d++) y[d] = x[d] * factor * weight[d];
    else
        for (long d = 0; d < D; d++) y[d] = x[d] * factor;
}

/* Without a residual the sum is x and is not written. */
void add_rms_norm(float *y, float *sum, const float *x, const float *residual, const float *weight, long T, long D,
                  float eps) {
    for (long t = 0; t < T; t++) {
        const float *row = x + t * D;
        if (residual) {
            for (long d = 0; d < D; d++) sum[t * D + d] = row[d] + residual[t * D + d];
            row = sum + t * D;
        }
        normalize(y + t * D, row, weight, D, eps);
    }
}

/* -- attention ----------------------------------------------------------------------------------------------------- */

INLINE void rotated(float *y, const float *x, const float *weight, const float *cos, const float *sin, long pairs,
                    long D, float eps) {
    float normed[D];
    if (weight) {
        normalize(normed, x, weight, D, eps);
        x = normed;
    }
    for (long i = 0; i < pairs; i++) {
        float a = x[i], b = x[i + pairs];
        y[i] = a * cos[i] - b * sin[i];
        y[i + pairs] = b * cos[i] + a * sin[i];
    }
    for (long i = 2 * pairs; i < D; i++) y[i] = x[i];
}

void rope_store(float *y, const float *q, const float *k, const float *v, const float *cos, const float *sin,
                const float *q_weight, const float *k_weight, float *k_pages, float *v_pages, const int64_t *slot,
                long T, long H, long G, long D, long pairs, long q_stride, long k_stride, long v_stride, float eps) {
    for (long t = 0; t < T; t++) {
        const float *c = cos + t * pairs, *s = sin + t * pairs;
        for (long h = 0; h < H; h++)
            rotated(y + (t * H + h) * D, q + t * q_stride + h * D, q_weight, c, s, pairs, D, eps);
        if (slot[t] < 0) continue;
        for (long g = 0; g < G; g++)
            rotated(k_pages + (slot[t] * G + g) * D, k + t * k_stride + g * D, k_weight, c, s, pairs, D, eps);
        memcpy(v_pages + slot[t] * G * D, v + t * v_stride, sizeof(float) * G * D);
    }
}

typedef struct {
    float *out;
    const float *q, *k, *v, *sink;
    const int32_t *table, *length;
    long H, G, D, E, page_size, width, q_stride, window;
    float scale, v_scale;
} Attention;

/* Scores of a few heads, D apart, for a few keys. */
INLINE void scores(int heads, int keys, const float *q, const float *const *k, float *score, long step, long D,
                   float scale) {
    vec sum[UP(16)]; /* of head h and key r: h * keys + r */
    long d = 0;
#pragma GCC unroll 16
    for (int i = 0; i < UP(16); i++) sum[i] = (vec){0};
    for (; d + LANES <= D; d += LANES) {
        vec part[COLUMNS];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) part[h] = load(q + h * D + d);
#pragma GCC unroll 16
        for (int r = 0; r < keys; r++) {
            vec row = load(k[r] + d);
            __builtin_prefetch(k[r + 8] + d);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sum[h * keys + r] += row * part[h];
        }
    }
    float result[UP(16)];
    collect(result, sum, heads * keys);
    for (; d < D; d++)
        for (int n = 0; n < heads * keys; n++)
            result[n] = plus_product(result[n], q[n / keys * D + d], k[n % keys][d]);
    for (int h = 0; h < heads; h++)
        for (int r = 0; r < keys; r++) score[h * step + r] = result[h * keys + r] * scale;
}

/* A few vectors of the outputs of a few heads, E apart: the sum of values in the order of keys. */
INLINE void weighted(int heads, int vectors, float *out, const float *const *v, const float *weight, long step,
                     long count, long e, long E) {
    vec sum[COLUMNS][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) sum[h][c] = (vec){0};
    for (long i = 0; i < count; i++) {
        vec part[4];
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            part[c] = load(v[i] + e + c * LANES);
            __builtin_prefetch(v[i + 8] + e + c * LANES);
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            vec factor = all(weight[h * step + i]);
#pragma GCC unroll 4
            for (int c = 0; c < vectors; c++) sum[h][c] += factor * part[c];
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) store(out + h * E + e + c * LANES, sum[h][c]);
}

INLINE void all_scores(int heads, const float *q, const float *const *k, float *score, long step, long count, long D,
                       float scale) {
    long i = 0;
    if (heads <= 2)
        for (; i + 8 <= count; i += 8) scores(heads, 8, q, k + i, score + i, step, D, scale);
    for (; i + 4 <= count; i += 4) scores(heads, 4, q, k + i, score + i, step, D, scale);
    for (; i < count; i++) scores(heads, 1, q, k + i, score + i, step, D, scale);
}

INLINE void all_values(int heads, float *out, const float *const *v, const float *weight, long step, long count,
                       long E) {
    long e = 0;
    for (; e + 4 * LANES <= E; e += 4 * LANES) weighted(heads, 4, out, v, weight, step, count, e, E);
    for (; e + LANES <= E; e += LANES) weighted(heads, 1, out, v, weight, step, count, e, E);
    for (; e < E; e++)
        for (int h = 0; h < heads; h++) {
            float sum = 0.0f;
            for (long i = 0; i < count; i++) sum += weight[h * step + i] * v[i][e];
            out[h * E + e] = sum;
        }
}

#define BY_HEADS(work) \
    for (h = 0; h + COLUMNS <= num_heads; h += COLUMNS) work(COLUMNS); \
    for (; COLUMNS > 3 && h + 3 <= num_heads; h += 3) work(3); \
    for (; h + 2 <= num_heads; h += 2) work(2); \
    for (; h < num_heads; h++) work(1)

/* One request's row, the query heads of one key head. */
static void attention_chunk(void *job, long chunk) {
    Attention *j = job;
    long r = chunk / j->G, g = chunk % j->G, D = j->D, E = j->E, num_heads = j->H / j->G;
    long end = j->length[r], begin = j->window && end > j->window ? end - j->window : 0, count = end - begin;
    long step = count + LANES, h; /* scores of a head, with room for whole vectors */
    const float *q = j->q + r * j->q_stride + g * num_heads * D;
    float *out = j->out + (r * j->H + g * num_heads) * E, *score = malloc(sizeof(float) * num_heads * step);
    const float **k = calloc(2 * count + 16, sizeof(float *)), **v = k + count; /* others than these are prefetched */
    for (long i = 0, size = j->page_size; i < count;) { /* a division for a page, not for a key */
        long page = (begin + i) / size, at = (begin + i) % size;
        for (long row = (j->table[r * j->width + page] * size + at) * j->G + g; at < size && i < count; at++, i++)
            k[i] = j->k + row * D, v[i] = j->v + row * E, row += j->G;
    }
#define SCORES(heads) all_scores(heads, q + h * D, k, score + h * step, step, count, D, j->scale)
    BY_HEADS(SCORES);
    for (h = 0; h < num_heads && count; h++) {
        float *s = score + h * step, *sink = j->sink ? (float *)j->sink + g * num_heads + h : NULL;
        float peak = sink ? *sink : -INFINITY;
        vec sum = {0}, peaks = all(peak);
        for (long i = count; i < count + LANES; i++) s[i] = -INFINITY;
        for (long i = 0; i < count; i += LANES) peaks = choose(load(s + i) > peaks, load(s + i), peaks);
        for (int i = 0; i < LANES; i++) peak = peaks[i] > peak ? peaks[i] : peak;
        for (long i = 0; i < count; i += LANES) {
            vec weight = load(s + i);
            weight = choose(weight == -INFINITY, all(0.0f), exponential(weight - peak));
            store(s + i, weight);
            sum += weight;
        }
        float whole = total(sum) + (sink ? expf(*sink - peak) : 0.0f), factor = j->v_scale / whole;
        for (long i = 0; i < count; i++) s[i] *= factor;
    }
#define VALUES(heads) all_values(heads, out + h * E, v, score + h * step, step, count, E)
    BY_HEADS(VALUES);
    free(k);
    free(score);
}

void attention(float *out, const float *q, const float *k, const float *v, const int32_t *table,
               const int32_t *length, const float *sink, long R, long H, long G, long D, long E, long page_size,
               long width, long q_stride, long window, float scale, float v_scale, int threads) {
    Attention job = {out, q, k, v, sink, table, length, H, G, D, E, page_size, width, q_stride, window, scale, v_scale};
    long keys = 0;
    for (long r = 0; r < R; r++) keys += window && length[r] > window ? window : length[r];
    parallel(attention_chunk, &job, R * G, keys * H * (D + E) < FEW ? 1 : threads);
}

/* -- experts ------------------------------------------------------------------------------------------------------- */

void route(float *weight, int32_t *expert, const float *logits, long T, long E, long K, int renormalize,
           float scaling) {
    for (long t = 0; t < T; t++) {
        const float *l = logits + t * E;
        char taken[E];
        memset(taken, 0, E);
        float sum = 0.0f, peak = 0.0f;
        for (long k = 0; k < K; k++) {
            long best = -1;
            for (long e = 0; e < E; e++) /* the first of equals */
                if (!taken[e] && (best < 0 || l[e] > l[best])) best = e;
            taken[best] = 1;
            if (!k) peak = l[best] == -INFINITY ? 0.0f : l[best];
            expert[t * K + k] = best;
            weight[t * K + k] = expf(l[best] - peak);
            sum += weight[t * K + k];
        }
        if (!renormalize) {
            sum = 0.0f;
            for (long e = 0; e < E; e++) sum += expf(l[e] - peak);
        }
        for (long k = 0; k < K; k++) weight[t * K + k] = sum == 0.0f ? 0.0f : weight[t * K + k] / sum * scaling;
    }
}

typedef struct {
    const void *w;
    const float *const *x;
    float *const *y;
    const long *expert, *begin; /* of those that are hit: their number, and their first pair */
    uint32_t *const *split;     /* of x, for matrix units */
    long F, D, size, parts, bf16;
} Grouped;

static void split_group(void *job, long hit) {
    Grouped *j = job;
    long n = j->begin[hit], T = j->begin[hit + 1] - n;
    for (long t = 0; t < T; t += UNIT)
        split(j->split[hit] + t * 3 * j->D / 2, j->x + n + t, T - t < UNIT ? T - t : UNIT, block_rows(T), j->D);
}

static void grouped_chunk(void *job, long chunk) {
    Grouped *j = job;
    long hit = chunk / j->parts, f = chunk % j->parts * j->size, end = f + j->size, n = j->begin[hit];
    long first = j->expert[hit] * j->F * j->D, count = j->begin[hit + 1] - n, last = end < j->F ? end : j->F;
    if (j->split)
        unit_products((const uint16_t *)j->w + first, NULL, j->split[hit], j->y + n, count, f, last, j->D);
    else if (j->bf16)
        bf16_products((const uint16_t *)j->w + first, NULL, j->x + n, j->y + n, count, f, last, j->D);
    else
        products((const float *)j->w + first, NULL, j->x + n, j->y + n, count, f, last, j->D);
}

typedef struct {
    float *const *mid;
    long pairs, I;
} Activation;

/* Rows of experts times their matrices; `parts`: memory for those of all rows, for matrix units. */
static void grouped_products(Grouped job, long hits, uint32_t *parts, int threads) {
    uint32_t *split[hits + 1];
    if (parts) {
        for (long hit = 0; hit < hits; hit++) {
            split[hit] = parts;
            parts += split_size(job.begin[hit + 1] - job.begin[hit], job.D) / 4;
        }
        job.split = split;
        parallel(split_group, &job, hits, job.begin[hits] * job.D < FEW / 16 ? 1 : threads);
    }
    job.parts = (job.F + job.size - 1) / job.size;
    parallel(grouped_chunk, &job, hits * job.parts, threads);
}

#define PAIRS 16 /* of a chunk */

static void activation_chunk(void *job, long chunk) {
    Activation *j = job;
    for (long n = chunk * PAIRS; n < j->pairs && n < (chunk + 1) * PAIRS; n++)
        silu_times(j->mid[n], j->mid[n], j->mid[n] + j->I, j->I);
}

typedef struct {
    float *y;
    const float *rows, *weight;
    const long *place;
    long K, D;
    float scaling;
} Combine;

/* A token's sum. */
static void combine_chunk(void *job, long t) {
    Combine *j = job;
    float *y = j->y + t * j->D;
    memset(y, 0, sizeof(float) * j->D);
    for (long n = t * j->K; n < (t + 1) * j->K; n++) {
        if (j->place[n] < 0) continue;
        const float *row = j->rows + j->place[n] * j->D, factor = j->weight[n] * j->scaling;
        for (long d = 0; d < j->D; d++) y[d] += factor * row[d];
    }
}

/* Pairs sorted by expert; the sum over a token's experts is in the order of k. */
void experts(float *y, const float *x, const float *weight, const int32_t *expert, const void *gate_up,
             const void *down, long T, long K, long E, long D, long I, float scaling, int bf16, int threads) {
    long N = T * K, count[E + 1], hit[E], begin[E + 1], hits = 0, pairs = 0, place[N];
    memset(count, 0, sizeof count);
    for (long n = 0; n < N; n++)
        if (expert[n] >= 0) count[expert[n]]++;
    for (long e = 0; e < E; e++) {
        long own = count[e];
        count[e] = pairs; /* from here on: where its next pair goes */
        if (own) hit[hits] = e, begin[hits++] = pairs;
        pairs += own;
    }
    begin[hits] = pairs;
    float *h = malloc(sizeof(float) * (N * (2 * I + D) + 1)), *rows = h + N * 2 * I;
    const float *in[N + 1];
    float *mid[N + 1], *out[N + 1];
    for (long n = 0; n < N; n++) {
        place[n] = expert[n] < 0 ? -1 : count[expert[n]]++;
        if (place[n] >= 0) in[place[n]] = x + n / K * D;
    }
    for (long n = 0; n < pairs; n++) mid[n] = h + n * 2 * I, out[n] = rows + n * D;
    uint32_t *parts = NULL;
    if (hits && bf16 && D % 32 == 0 && I % 32 == 0 && units(-1)) {
        long bytes = 0;
        for (long i = 0; i < hits; i++) bytes += split_size(begin[i + 1] - begin[i], D > I ? D : I);
        parts = aligned_alloc(64, bytes);
    }
    threads = pairs * 3 * I * D < FEW ? 1 : threads;
    int few = threads > 1 && hits < 4 * threads;
    long size = few ? chunk_size(FEW, 2 * I, D, threads) : 2 * I;
    if (parts) size = unit_rows(size, pairs / hits, D);
    grouped_products((Grouped){gate_up, in, mid, hit, begin, NULL, 2 * I, D, size, 0, bf16}, hits, parts, threads);
    Activation activation = {mid, pairs, I};
    parallel(activation_chunk, &activation, (pairs + PAIRS - 1) / PAIRS, pairs * I * 4 < FEW ? 1 : threads);
    size = few ? chunk_size(FEW, D, I, threads) : D;
    if (parts) size = unit_rows(size, pairs / hits, I);
    const float *const *from = (const float *const *)mid;
    grouped_products((Grouped){down, from, out, hit, begin, NULL, D, I, size, 0, bf16}, hits, parts, threads);
    free(parts);
    Combine combine = {y, rows, weight, place, K, D, scaling};
    parallel(combine_chunk, &combine, T, N * D < FEW ? 1 : threads);
    free(h);
}

/* -- recorded calls ------------------------------------------------------------------------------------------------ */

typedef union {
    void *p;
    long n;
    double f;
} Argument;

typedef struct {
    long kernel;
    Argument a[20];
} Call;

/* The numbers of kernels are their places in library.py's ARGUMENTS. */
void replay(const Call *calls, long count) {
    for (const Call *call = calls; call < calls + count; call++) {
        const Argument *a = call->a;
        switch (call->kernel) {
        case 0: linear(a[0].p, a[1].p, a[2].p, a[3].p, a[4].n, a[5].n, a[6].n, a[7].n, a[8].n); break;
        case 1: gated_silu(a[0].p, a[1].p, a[2].n, a[3].n); break;
        case 2: add_gated(a[0].p, a[1].p, a[2].p, a[3].p, a[4].n, a[5].n); break;
        case 3: add_rms_norm(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].n, a[6].n, a[7].f); break;
        case 4:
            rope_store(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].p, a[9].p, a[10].p,
                       a[11].n, a[12].n, a[13].n, a[14].n, a[15].n, a[16].n, a[17].n, a[18].n, a[19].f);
            break;
        case 5:
            attention(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].n, a[8].n, a[9].n, a[10].n,
                      a[11].n, a[12].n, a[13].n, a[14].n, a[15].n, a[16].f, a[17].f, a[18].n);
            break;
        case 6: route(a[0].p, a[1].p, a[2].p, a[3].n, a[4].n, a[5].n, a[6].n, a[7].f); break;
        case 7:
            experts(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].n, a[7].n, a[8].n, a[9].n, a[10].n, a[11].f,
                    a[12].n, a[13].n);
            break;
        }
    }
}
