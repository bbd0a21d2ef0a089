// One row from logits to token, literally as docs/graph.md says.

#include "row.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace topw {
namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr double kSmallestLogWeight = -60.0;
constexpr double kSmallestNorm = 1e-12;

struct Parameters {
  double lam, beta, temperature, selection, init_top_p, scale, uniform;
};

bool in_range(float value, float low) { return value >= low && value < INFINITY; }

bool read(const topw_inputs &inputs, int64_t row, Parameters &out) {
  const float lam = inputs.lam[row], beta = inputs.beta[row], temperature = inputs.temperature[row];
  const float selection = inputs.selection_temperature[row], q = inputs.init_top_p[row];
  const float scale = inputs.geom_scale[row], u = inputs.uniform[row];
  out = {lam, beta, temperature, selection == 0 ? temperature : selection, q, scale, u};
  return in_range(lam, 0) && in_range(beta, 0) && in_range(temperature, 0) && in_range(selection, 0) && q > 0 &&
         q <= 1 && isfinite(scale) && u >= 0 && u < 1;
}

float half(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  float value = exponent == 0    ? ldexpf(static_cast<float>(mantissa), -24)
                : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                 : ldexpf(static_cast<float>(1024 + mantissa), exponent - 25);
  return bits & 0x8000 ? -value : value;
}

double entry(const topw_table &table, int64_t token, int64_t k) {
  const int64_t at = token * table.hidden + k;
  if (table.dtype == TOPW_FLOAT32) return static_cast<const float *>(table.rows)[at];
  const uint16_t bits = static_cast<const uint16_t *>(table.rows)[at];
  if (table.dtype == TOPW_FLOAT16) return half(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

void features(const topw_table &table, int metric, int64_t token, double *x) {
  const int64_t d = table.hidden;
  double norm = 0;
  for (int64_t k = 0; k < d; ++k) {
    x[k] = entry(table, token, k);
    if (metric != TOPW_MAHALANOBIS) x[k] = (x[k] - table.mean[k]) * table.inverse_std[k];
    norm += x[k] * x[k];
  }
  norm = std::max(sqrt(norm), kSmallestNorm);
  for (int64_t k = 0; k < d; ++k) {
    x[k] /= norm;
    if (metric == TOPW_MAHALANOBIS) x[k] = (x[k] - table.mean[k]) * table.inverse_std[k];
  }
}

double distance(int metric, int64_t d, const double *x, const double *y) {
  double sum = 0;
  if (metric == TOPW_COSINE) {
    for (int64_t k = 0; k < d; ++k) sum += x[k] * y[k];
    return 1.0 - std::clamp(sum, -1.0, 1.0);
  }
  for (int64_t k = 0; k < d; ++k) sum += (x[k] - y[k]) * (x[k] - y[k]);
  return sqrt(sum);
}

// The first maximiser of J over the prefixes of tokens in the given order.
int64_t first_maximiser(int64_t n, const int32_t *order, const double *p, const double *phi, double c) {
  if (c <= 0) return 1;
  double G = 0, P = 0, best = -INFINITY;
  int64_t k = 1;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t at = order[i];
    G += p[at];
    P += p[at] * phi[at];
    const double J = P / G + c * log(G);
    if (J > best) best = J, k = i + 1;
  }
  return k;
}

void answer_invalid(const topw_inputs &inputs, int64_t row, const topw_outputs &out) {
  out.next_token[row] = -1;
  out.logprob[row] = 0;
  out.kept[row] = 0;
  out.certified[row] = 0;
  if (out.mass) out.mass[row] = 0;
  if (out.keep_mask) memset(out.keep_mask + row * inputs.vocab, 0, static_cast<size_t>(inputs.vocab));
  if (out.reports) out.reports[row] = {TOPW_INVALID, 0, 0, 0, 0, 0};
}

}  // namespace

bool sample_row(const topw_options &options, const topw_table *table, const topw_inputs &inputs, int64_t row,
                topw_workspace &w, const topw_outputs &out) {
  const int64_t V = inputs.vocab;
  answer_invalid(inputs, row, out);
  Parameters P;
  if (!read(inputs, row, P)) return true;

  if (!w.logits.reserve(V) || !w.order.reserve(V)) return false;
  const float *raw = inputs.logits + row * V;
  memcpy(w.logits.data(), raw, static_cast<size_t>(V) * sizeof(float));
  for (int64_t e = row * inputs.edits; e < (row + 1) * inputs.edits; ++e) {
    const int64_t id = inputs.edit_ids[e];
    if (id < 0 || id >= V) continue;
    const float old = raw[id], penalty = inputs.edit_penalty[e];
    if (!(penalty > 0)) return true;
    w.logits[id] = (old > 0 ? old / penalty : old * penalty) + inputs.edit_bias[e];
  }
  const float *l = w.logits.data();
  int64_t n = 0;
  for (int64_t i = 0; i < V; ++i) {
    if (isnan(l[i]) || l[i] == INFINITY) return true;
    if (l[i] > -INFINITY) w.order[n++] = static_cast<int32_t>(i);
  }
  if (n == 0) return true;
  int32_t *C = w.order.data();
  std::sort(C, C + n, [l](int32_t i, int32_t j) { return l[i] > l[j] || (l[i] == l[j] && i < j); });

  const bool greedy = P.temperature < static_cast<double>(kGreedyBelow);
  int64_t kept = 1;
  bool certified = true;
  int32_t stage = TOPW_GREEDY;
  int32_t steps = 0;
  if (!w.kept.reserve(V) || !w.by_phi.reserve(V) || !w.a.reserve(V) || !w.p.reserve(V) || !w.phi.reserve(V) ||
      !w.dist.reserve(V) || !w.member.reserve(V) || !w.next.reserve(V))
    return false;
  if (greedy) {
    w.kept[0] = C[0];
  } else {
    const int64_t m = std::min(n, options.top_m);
    const double c = P.beta - P.lam;
    double mass = 0;
    for (int64_t i = 0; i < m; ++i) {
      w.a[i] = (static_cast<double>(l[C[i]]) - static_cast<double>(l[C[0]])) / P.selection;
      w.p[i] = exp(std::max(w.a[i], kSmallestLogWeight));
      w.phi[i] = P.lam * w.a[i];
      w.by_phi[i] = static_cast<int32_t>(i);
      mass += w.p[i];
    }
    int64_t k0 = m;
    if (P.init_top_p < 1) {
      double G = 0;
      for (k0 = 1; k0 <= m; ++k0)
        if ((G += w.p[k0 - 1]) >= P.init_top_p * mass) break;
    }
    const int64_t K = first_maximiser(m, w.by_phi.data(), w.p.data(), w.phi.data(), c);
    certified = P.scale >= 0 && K <= k0;
    stage = certified ? TOPW_POOL : P.scale >= 0 ? TOPW_GEOMETRY : TOPW_LITERAL;
    for (int64_t i = 0; i < m; ++i) w.member[i] = i < (certified ? K : k0);

    const int64_t d = table ? table->hidden : 0;
    if (!certified && table && (!w.x.reserve(m * d) || !w.y.reserve(m))) return false;
    if (!certified && table)
      for (int64_t i = 0; i < m; ++i) features(*table, options.metric, C[i], &w.x[i * d]);
    while (!certified && steps < options.alt_iters) {
      ++steps;
      for (int64_t i = 0; i < m; ++i) {
        int64_t members = 0;
        for (int64_t j = 0; j < m; ++j)
          if (w.member[j])
            w.dist[members++] = !table ? (i == j ? 0.0 : 1.0) : distance(options.metric, d, &w.x[i * d], &w.x[j * d]);
        const int64_t k = std::min<int64_t>(options.knn_k ? options.knn_k : 1, members);
        std::partial_sort(w.dist.data(), w.dist.data() + k, w.dist.data() + members);
        double sum = 0;
        for (int64_t j = 0; j < k; ++j) sum += w.dist[j];
        const double f = w.member[i] ? 0.0 : -P.scale * (sum / static_cast<double>(k));
        w.phi[i] = f + P.lam * w.a[i];
        w.by_phi[i] = static_cast<int32_t>(i);
      }
      const double *phi = w.phi.data();
      std::sort(w.by_phi.data(), w.by_phi.data() + m,
                [phi](int32_t i, int32_t j) { return phi[i] > phi[j] || (phi[i] == phi[j] && i < j); });
      const int64_t k = first_maximiser(m, w.by_phi.data(), w.p.data(), phi, c);
      memset(w.next.data(), 0, static_cast<size_t>(m));
      for (int64_t i = 0; i < k; ++i) w.next[w.by_phi[i]] = 1;
      const bool same = memcmp(w.next.data(), w.member.data(), static_cast<size_t>(m)) == 0;
      memcpy(w.member.data(), w.next.data(), static_cast<size_t>(m));
      if (same) break;
    }
    kept = 0;
    for (int64_t i = 0; i < m; ++i)
      if (w.member[i]) w.kept[kept++] = C[i];
  }

  if (out.mass) {
    double all = 0, ours = 0;
    if (P.selection >= static_cast<double>(kGreedyBelow)) {
      const double top = l[C[0]];
      for (int64_t i = 0; i < V; ++i) all += exp((static_cast<double>(l[i]) - top) / P.selection);
      for (int64_t i = 0; i < kept; ++i) ours += exp((static_cast<double>(l[w.kept[i]]) - top) / P.selection);
    }
    out.mass[row] = all > 0 ? static_cast<float>(ours / all) : 1.0f;
  }
  int64_t drawn = 0;
  if (!greedy) {
    double total = 0, at = 0;
    for (int64_t i = 0; i < kept; ++i) {
      w.dist[i] = (static_cast<double>(l[w.kept[i]]) - static_cast<double>(l[w.kept[0]])) / P.temperature;
      total += exp(w.dist[i]);
    }
    for (drawn = 0; drawn < kept - 1; ++drawn)
      if ((at += exp(w.dist[drawn])) - P.uniform * total > 0) break;
    out.logprob[row] = static_cast<float>(w.dist[drawn] - log(total));
  }
  out.next_token[row] = w.kept[drawn];
  out.kept[row] = static_cast<int32_t>(kept);
  out.certified[row] = certified;
  if (out.keep_mask)
    for (int64_t i = 0; i < kept; ++i) out.keep_mask[row * V + w.kept[i]] = 1;
  if (out.reports) out.reports[row] = {stage, 0, steps, 0, 0, 0};
  return true;
}

}  // namespace topw
