// Random numbers (docs/contract/random.md), a function of (seed, position) alone.
#ifndef TOPW_RANDOM_H
#define TOPW_RANDOM_H

#include <array>
#include <cstdint>
#include <cstdio>
#include <random>

namespace topw {

__extension__ typedef unsigned __int128 Product;

// The first word of Philox 4x64-10 with key (seed, 0) and counter low + 2^64 high + 1.
inline std::uint64_t philox(std::uint64_t seed, std::uint64_t low, std::uint64_t high) {
  std::uint64_t x0 = low + 1, x1 = high + (x0 == 0), x2 = x0 == 0 && x1 == 0, x3 = 0, k0 = seed, k1 = 0;
  for (int round = 0; round < 10; ++round) {
    const Product a = Product{0xD2E7470EE14C6C93} * x0, b = Product{0xCA5A826395121157} * x2;
    x0 = std::uint64_t(b >> 64) ^ x1 ^ k0;
    x1 = std::uint64_t(b);
    x2 = std::uint64_t(a >> 64) ^ x3 ^ k1;
    x3 = std::uint64_t(a);
    k0 += 0x9E3779B97F4A7C15;
    k1 += 0xBB67AE8584CAA73B;
  }
  return x0;
}

inline float uniform_for(std::uint64_t seed, std::uint64_t position) {
  return float(philox(seed, position, 0) >> 40) * 0x1p-24F;  // exact, and below 1
}

// The seed of a prompt's sequence: the prompt's for the first one, else one below 2^53.
inline std::uint64_t sequence_seed(std::uint64_t seed, std::uint64_t index) {
  return index ? philox(seed, index, ~std::uint64_t{1}) >> 11 : seed;
}

inline std::uint64_t fresh_seed() {  // below 2^53: exact as a double in JSON readers
  std::random_device device;
  return (std::uint64_t{device()} << 32 | device()) >> 11;
}

// The table of docs/contract/random.md: seed, low, high, word.
inline int self_test() {
  constexpr std::uint64_t kMax = ~std::uint64_t{0}, kHalf = std::uint64_t{1} << 63;
  static const std::array<std::array<std::uint64_t, 4>, 11> kVectors{{
      {0, 0, 0, 0x02f4ba6408e4d89b},
      {0, 1, 0, 0x809bf322883987c3},
      {0, 0, 1, 0x363c6d54f81ba26e},
      {7, 3, 0, 0x712a540f349a5c44},
      {7, 3, 1, 0xe53f27f8c7154287},
      {42, 1024, 0, 0x1e70f3916f9d3cf6},
      {2026, 99999, 5, 0x7a88abbf723bafa7},
      {4294967296, 12, 0, 0xb9f33da716ea8074},
      {kHalf, 0, 0, 0xf0f36415f37c24e2},
      {kMax, kMax, 0, 0xe23d141355b65d09},
      {kMax, 0, kMax, 0x4ebd9b5c78bbc980},
  }};
  std::size_t right = 0;
  for (const auto &[seed, low, high, word] : kVectors)
    right += philox(seed, low, high) == word && (high || double(uniform_for(seed, low)) * 16777216 == double(word >> 40));
  std::printf("self-test: %zu of %zu random numbers are those of docs/contract/random.md\n", right, kVectors.size());
  return right == kVectors.size() ? 0 : 1;
}

}  // namespace topw

#endif
