// Folds bytes to FOLDED of them that have the same crc32 as all, see crc32.py.
//
// Without carries, a multiplication moves 8 bytes to where 256 bytes more follow them: it replaces
// their power of x by that power's remainder, which leaves the crc as it is (Gopal et al., "Fast
// CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009). A processor that has no
// such instruction has no kernel either.

#if defined(__PCLMUL__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__VPCLMULQDQ__) && defined(__AVX512F__)
typedef __m512i Words;
#define MULTIPLY _mm512_clmulepi64_epi128
#elif defined(__VPCLMULQDQ__) && defined(__AVX2__)
typedef __m256i Words;
#define MULTIPLY _mm256_clmulepi64_epi128
#else
typedef __m128i Words;
#define MULTIPLY _mm_clmulepi64_si128
#endif

namespace {

constexpr int FOLDED = 256, VECTORS = FOLDED / sizeof(Words), WORDS = sizeof(Words) / 8;

// x^n modulo zlib's polynomial, the highest power in the lowest bit, as everywhere here; a product
// of two such numbers lies one bit too low, hence the shift.
constexpr uint64_t power(int n) {
  uint32_t remainder = 0x80000000;
  while (n--) remainder = remainder >> 1 ^ (remainder & 1 ? 0xedb88320 : 0);
  return uint64_t(remainder) << 1;
}

// Of the first and the second 8 bytes of 16: they differ by x^64, and 32 more are a remainder's.
constexpr uint64_t FIRST = power(8 * FOLDED + 32), SECOND = power(8 * FOLDED - 32);

}  // namespace

// n: a positive multiple of FOLDED. The crc of `out` is to begin with zero, not with zlib's ones:
// these are in it.
extern "C" void fold_crc32(const char* p, int64_t n, char* out) {
  Words folded[VECTORS], factors;
  for (int i = 0; i < WORDS; i++) factors[i] = i % 2 ? SECOND : FIRST;
  std::memcpy(folded, p, FOLDED);
  folded[0][0] ^= 0xffffffff;
  for (int64_t at = FOLDED; at < n; at += FOLDED) {
#pragma GCC unroll 16
    for (int j = 0; j < VECTORS; j++) {
      Words next;
      std::memcpy(&next, p + at + j * sizeof next, sizeof next);
      folded[j] = MULTIPLY(folded[j], factors, 0x00) ^ MULTIPLY(folded[j], factors, 0x11) ^ next;
    }
  }
  std::memcpy(out, folded, FOLDED);
}

#endif
