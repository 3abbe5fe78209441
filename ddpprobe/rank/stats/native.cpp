// The statistics of one tensor on one core: a row (see rows.py) and a wide row (see histogram.py).
//
// Built by native.py with the machine's own compiler and without any fast-math flag: the order of
// every addition is written down here, so that a tensor gives the same bits at every call and on
// every machine, and a NaN stays one. 64 lanes are added up in float32 over 1024 elements at a
// time (each number passes at most 22 roundings, 1.3e-6 of sum|x|), then carried in float64.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace {

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));

constexpr int LANES = 64, WIDTH = VECTOR_BYTES / 4, VECTORS = LANES / WIDTH, BLOCK = 1024;
// How far ahead memory is asked for, in bytes: the processor itself asks ahead only to the end of a
// page (measured: 30 -> 36 GB/s from memory, nothing lost in cache; 16 KiB and more lose there).
constexpr int AHEAD = 8192, LINE = 64;
constexpr double INF = std::numeric_limits<double>::infinity();
// Squares of float32 numbers outside this range could over- or underflow in float32.
constexpr double SAFE_LOW = 1e-13, SAFE_HIGH = 1e18;

// ---- the three dtypes: `vector j` of 64 elements as float32, and one element as float64

struct Float32 { float value; };
struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

template <class To, class From>
inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits, read differently");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Vector>
inline Vector read(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline Floats lanes(const Float32* p, int j) { return read<Floats>(p + WIDTH * j); }

// Two 16-bit elements share 32 bits: the first half of the vectors takes the lower ones, the second
// half the upper ones.
constexpr int HALF = VECTORS / 2;

inline Floats lanes(const BFloat16* p, int j) {
  const Ints pairs = read<Ints>(p + 2 * WIDTH * (j % HALF));
  return as<Floats>(j < HALF ? pairs << 16 : (pairs >> 16) << 16);
}

inline Floats lanes(const Float16* p, int j) {
  const Ints pairs = read<Ints>(p + 2 * WIDTH * (j % HALF));
  const Ints half = (j < HALF ? pairs : pairs >> 16) & 0xffff;
  const Ints sign = (half & 0x8000) << 16, magnitude = (half & 0x7fff) << 13;
  const Ints finite = as<Ints>(as<Floats>(magnitude) * 0x1p112f);  // exact, subnormals too
  return as<Floats>((magnitude >= 0x7c00 << 13 ? magnitude | 0x7f800000 : finite) | sign);
}

inline double number(Float32 x) { return x.value; }
inline double number(BFloat16 x) { return as<float>(uint32_t(x.bits) << 16); }
inline double number(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = uint32_t(x.bits & 0x7fff) << 13;
  const uint32_t finite = as<uint32_t>(as<float>(magnitude) * 0x1p112f);
  return as<float>((magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000 : finite) | sign);
}

// ---- rows

struct Row {
  double numel = 0, nan = 0, pos_inf = 0, neg_inf = 0, zeros = 0;
  double low = INF, high = -INF, sum = 0, square = 0;

  void add(double x, double times) {
    if (std::isnan(x)) nan += times;
    else if (x == INF) pos_inf += times;
    else if (x == -INF) neg_inf += times;
    else {
      zeros += x == 0 ? times : 0;
      low = x < low ? x : low;
      high = x > high ? x : high;
      sum += times * x;
      square += times * (x * x);
    }
  }
};

template <class T>
__attribute__((noinline)) void add_one_by_one(const T* p, int n, Row& row) {
  for (int i = 0; i < n; i++) row.add(number(p[i]), 1);
}

inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }  // b where a is NaN
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// The upper half of the lanes onto the lower one, until one is left.
inline float add_up(const Floats& vector) {
  float lane[WIDTH];
  std::memcpy(lane, &vector, sizeof lane);
  for (int half = WIDTH / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}

// n: a multiple of LANES, at most BLOCK.
template <class T>
inline void add_block(const T* p, int n, Row& row) {
  Floats sum[VECTORS] = {}, square[VECTORS] = {}, low[VECTORS], high[VECTORS];
  Ints zeros[VECTORS] = {};
  for (int j = 0; j < VECTORS; j++) {
    low[j] = Floats{} + float(INF);
    high[j] = Floats{} - float(INF);
  }
  for (int k = 0; k < n; k += LANES) {
    for (int at = 0; at < int(LANES * sizeof(T)); at += LINE)
      __builtin_prefetch(reinterpret_cast<const char*>(p + k) + AHEAD + at);  // never faults
#pragma GCC unroll 16
    for (int j = 0; j < VECTORS; j++) {
      const Floats x = lanes(p + k, j);
      sum[j] += x;
      square[j] += x * x;
      low[j] = smaller(x, low[j]);
      high[j] = larger(x, high[j]);
      zeros[j] -= x == 0;
    }
  }
  // As above: the same tree of additions however long a vector is.
  for (int half = VECTORS / 2; half; half /= 2) {
    for (int j = 0; j < half; j++) {
      sum[j] += sum[j + half];
      square[j] += square[j + half];
      low[j] = smaller(low[j + half], low[j]);
      high[j] = larger(high[j + half], high[j]);
      zeros[j] += zeros[j + half];
    }
  }
  const double total = add_up(sum[0]), squares = add_up(square[0]);
  float lowest = low[0][0], highest = high[0][0];
  int count = 0;
  for (int i = 0; i < WIDTH; i++) {
    lowest = low[0][i] < lowest ? low[0][i] : lowest;
    highest = high[0][i] > highest ? high[0][i] : highest;
    count += zeros[0][i];
  }
  const double peak = -lowest > highest ? -lowest : highest;
  // One NaN or infinity makes the sum of the squares not finite.
  if (!std::isfinite(squares) || !(peak == 0 || (SAFE_LOW < peak && peak < SAFE_HIGH)))
    return add_one_by_one(p, n, row);
  row.zeros += count;
  row.low = lowest < row.low ? lowest : row.low;
  row.high = highest > row.high ? highest : row.high;
  row.sum += total;
  row.square += squares;
}

template <class T>
__attribute__((noinline)) Row reduce(const T* p, int64_t n) {
  Row row;
  row.numel = double(n);
  int64_t done = 0;
  for (; done + BLOCK <= n; done += BLOCK) add_block(p + done, BLOCK, row);
  const int whole = int(n - done) / LANES * LANES;
  if (whole) add_block(p + done, whole, row);
  done += whole;
  add_one_by_one(p + done, int(n - done), row);
  return row;
}

void write(const Row& row, double times, double* out) {
  const double columns[9] = {  // + 0.0: no negative zero, whichever zero came first
      row.numel * times, row.nan * times, row.pos_inf * times, row.neg_inf * times,
      row.zeros * times, row.low + 0.0, row.high + 0.0, row.sum * times, row.square * times};
  std::memcpy(out, columns, sizeof columns);
}

// ---- checksums

constexpr int64_t FACTORS = 1 << 16;  // of the words within a row, and of the rows, see checksum.py

uint64_t checksum(const uint64_t* words, int64_t n, const uint64_t* within,
                  const uint64_t* between) {
  uint64_t total = 0;
  for (int64_t row = 0; row * FACTORS < n; row++) {
    const uint64_t* const p = words + row * FACTORS;
    const int64_t m = n - row * FACTORS < FACTORS ? n - row * FACTORS : FACTORS;
    uint64_t sum = 0;
    for (int64_t i = 0; i < m; i++) sum += p[i] * within[i];
    total += sum * between[row % FACTORS];
  }
  return total;
}

// ---- wide rows

enum { NEAR_ZERO = 9, BELOW, ABOVE, EXPONENT, HEAD };  // columns, as in histogram.py
constexpr double LOWEST = -1000;

// Where a number falls: in bins 0 ... bins - 1, or in one of three more: below, above, not finite.
struct Bins {
  int bins;
  bool fixed;
  double low, high, origin, scale, shift;

  Bins(int bins, bool fixed, double low, double high)
      : bins(bins), fixed(fixed), low(fixed ? low : -INF), high(fixed ? high : INF),
        origin(fixed ? low : 0), scale(bins / (high - low)), shift(fixed ? 0 : bins / 2) {}

  // Without a fixed range: divide [-2**exponent, 2**exponent). Powers of two scale exactly.
  void fit(double exponent) {
    if (!fixed) scale = exponent > LOWEST ? std::ldexp(bins / 2, -int(exponent)) : 0;
  }

  int slot(double x) const {
    double at = std::floor((x - origin) * scale) + shift;
    at = at > 0 ? at : 0;
    at = at < bins - 1 ? at : bins - 1;
    at = x < low ? bins : at;
    at = x > high ? bins + 1 : at;
    return int(std::fabs(x) < INF ? at : bins + 2);
  }
};

constexpr int TABLES = 4;  // neighbours count in different tables: equal ones do not wait in line
constexpr int STEP = 512;

// Their order within 64 is not kept.
template <class T>
inline void unpack(const T* p, int n, float* out) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int j = 0; j < VECTORS; j++) {
      const Floats x = lanes(p + i, j);
      std::memcpy(out + i + WIDTH * j, &x, sizeof x);
    }
  }
  for (; i < n; i++) out[i] = float(number(p[i]));
}

template <class T>
double count(const T* p, int64_t n, const Bins& bins, double eps, int64_t* counts) {
  const int width = bins.bins + 3;
  int near_zero = 0;
  int64_t total = 0;
  float x[STEP];
  int slots[STEP];
  for (int64_t done = 0; done < n; done += STEP, total += near_zero, near_zero = 0) {
    const int m = int(n - done < STEP ? n - done : STEP);
    unpack(p + done, m, x);
    for (int i = 0; i < m; i++) near_zero += std::fabs(double(x[i])) <= eps;
    if (!bins.bins) continue;
    for (int i = 0; i < m; i++) slots[i] = bins.slot(x[i]);
    int i = 0;
    for (; i + TABLES <= m; i += TABLES)
      for (int t = 0; t < TABLES; t++) counts[t * width + slots[i + t]]++;
    for (; i < m; i++) counts[slots[i]]++;
  }
  return double(total);
}

constexpr int PATTERNS = 1 << 16;
constexpr int STRIDE = PATTERNS + 16;  // of the tables: the same place in two would look alike
constexpr int64_t FEW = 1 << 18;  // below this many elements, going through all patterns is slower

struct Pattern { uint16_t bits; uint32_t times; };

// Memory of one thread; 1.5 MiB once it is used.
struct Scratch {
  uint32_t tables[TABLES * STRIDE];
  Pattern found[PATTERNS + 1];
};
thread_local Scratch thread_scratch;

// Write the patterns of 16 bits among n < 2**32 elements in ascending order; return how many.
int count_patterns(const uint16_t* p, int64_t n, Scratch& scratch) {
  uint32_t* const table = scratch.tables;
  std::memset(table, 0, sizeof scratch.tables);
  int64_t i = 0;
  for (; i + TABLES <= n; i += TABLES) {
    const uint64_t four = read<uint64_t>(p + i);
    table[four & 0xffff]++;
    table[STRIDE + (four >> 16 & 0xffff)]++;
    table[2 * STRIDE + (four >> 32 & 0xffff)]++;
    table[3 * STRIDE + (four >> 48)]++;
  }
  for (; i < n; i++) table[p[i]]++;
  int kinds = 0;
  for (int k = 0; k < PATTERNS; k++) {
    uint32_t times = 0;
    for (int t = 0; t < TABLES; t++) times += table[t * STRIDE + k];
    scratch.found[kinds] = {uint16_t(k), times};
    kinds += times != 0;
  }
  return kinds;
}

double exponent_of(const Row& row) {
  const double peak = -row.low > row.high ? -row.low : row.high;
  int exponent = 0;
  std::frexp(peak, &exponent);
  return peak > 0 && peak < INF ? exponent : LOWEST;
}

struct Request {
  int64_t n;        // elements
  double repeats;   // how often each of them stands
  double eps;
  Bins bins;
  int64_t* counts;  // zeros [TABLES * (bins + 3)]
  double* out;      // [HEAD + bins]
};

void write(const Request& q, double near_zero) {
  const int bins = q.bins.bins;
  const auto total = [&](int slot) {
    int64_t sum = 0;
    for (int t = 0; t < TABLES; t++) sum += q.counts[t * (bins + 3) + slot];
    return double(sum) * q.repeats;
  };
  q.out[NEAR_ZERO] = near_zero * q.repeats;
  q.out[BELOW] = total(bins);
  q.out[ABOVE] = total(bins + 1);
  for (int k = 0; k < bins; k++) q.out[HEAD + k] = total(k);
}

template <class T>
void measure(const T* p, Request& q) {
  const Row row = reduce(p, q.n);
  write(row, q.repeats, q.out);
  q.bins.fit(q.out[EXPONENT] = exponent_of(row));
  write(q, count(p, q.n, q.bins, q.eps, q.counts));
}

// The same for 16-bit dtypes: every number that occurs is looked at once.
template <class T>
void measure_patterns(const T* p, Request& q) {
  Scratch* scratch = &thread_scratch;
  asm("" : "+r"(scratch));  // a pointer like any other: else each use of it looks the thread up
  const int kinds = count_patterns(reinterpret_cast<const uint16_t*>(p), q.n, *scratch);
  const Pattern* const found = scratch->found;
  Row row;
  row.numel = double(q.n);
  for (int k = 0; k < kinds; k++) row.add(number(T{found[k].bits}), found[k].times);
  write(row, q.repeats, q.out);
  q.bins.fit(q.out[EXPONENT] = exponent_of(row));
  double near_zero = 0;
  for (int k = 0; k < kinds; k++) {
    const double x = number(T{found[k].bits});
    near_zero += std::fabs(x) <= q.eps ? found[k].times : 0;
    if (q.bins.bins) q.counts[q.bins.slot(x)] += found[k].times;
  }
  write(q, near_zero);
}

// Elements by sign and exponent, as a float32 has them in its top nine bits; ZERO of a zero.
constexpr int ZERO = 512;

int pattern(uint32_t bits) { return bits << 1 ? int(bits >> 23) : ZERO; }
int pattern(uint16_t bits) { return pattern(uint32_t(bits) << 16); }  // of a bfloat16
int pattern(Float16 x) {
  const int sign = x.bits >> 15 << 8, exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  if (exponent == 31) return sign + 255;
  if (exponent) return sign + exponent - 15 + 127;
  return mantissa ? sign + (31 - __builtin_clz(mantissa)) - 24 + 127 : ZERO;
}
int pattern(uint64_t bits) {  // of a float64; what a float32 cannot hold is at its ends
  const int sign = int(bits >> 63) << 8, exponent = int(bits >> 52) & 2047;
  if (!(bits << 1)) return ZERO;
  const int moved = exponent - 1023 + 127;
  return sign + (exponent == 2047 ? 255 : moved < 0 ? 0 : moved > 254 ? 254 : moved);
}

// Several tables, as neighbours that share a pattern would wait for each other's addition.
template <class Word>
void count_exponents(const Word* p, int64_t n, double repeats, double* out) {
  int64_t table[TABLES][ZERO + 1] = {};
  int64_t i = 0;
  for (; i + TABLES <= n; i += TABLES)
    for (int t = 0; t < TABLES; t++) table[t][pattern(p[i + t])]++;
  for (; i < n; i++) table[0][pattern(p[i])]++;
  for (int k = 0; k < ZERO; k++) {
    int64_t sum = 0;
    for (int t = 0; t < TABLES; t++) sum += table[t][k];
    out[k] = double(sum) * repeats;
  }
}

}  // namespace

#define ENTRIES(dtype, T, measured)                                                               \
  bool row_##dtype(const T* p, int64_t n, int64_t repeats, double* out) {                         \
    const Row row = reduce(p, n);                                                                 \
    write(row, double(repeats), out);                                                             \
    return row.nan + row.pos_inf + row.neg_inf > 0;                                               \
  }                                                                                               \
  void wide_##dtype(const T* p, int64_t n, int64_t repeats, int bins, bool fixed, double low,     \
                    double high, double eps, int64_t* counts, double* out) {                      \
    Request q{n, double(repeats), eps, Bins(bins, fixed, low, high), counts, out};                \
    measured;                                                                                     \
  }

extern "C" {
void add_checksum(const uint64_t* words, int64_t n, const uint64_t* within,
                  const uint64_t* between, uint64_t* out) {
  *out += checksum(words, n, within, between);
}

#define PATTERNS_OF(dtype, Word)                                                 \
  void patterns_##dtype(const Word* p, int64_t n, int64_t repeats, double* out) { \
    count_exponents(p, n, double(repeats), out);                                  \
  }
PATTERNS_OF(float32, uint32_t)
PATTERNS_OF(bfloat16, uint16_t)
PATTERNS_OF(float16, Float16)
PATTERNS_OF(float64, uint64_t)

ENTRIES(float32, Float32, measure(p, q))
ENTRIES(bfloat16, BFloat16, n < FEW || n >> 32 ? measure(p, q) : measure_patterns(p, q))
ENTRIES(float16, Float16, n < FEW || n >> 32 ? measure(p, q) : measure_patterns(p, q))
}
