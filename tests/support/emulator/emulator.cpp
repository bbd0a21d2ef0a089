// The fibres of emulator.h: stacks, switching, barriers, scheduling.

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fibre.h"
#include "platform.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace topw {
namespace emulator {

Thread *current = nullptr;
Settings settings;

namespace {

constexpr unsigned kMostThreads = 1024;
constexpr uint64_t kPatience = 20000;  // pauses per live thread without another event before giving up
constexpr size_t kStacksAtOnce = 256;
constexpr size_t kMargin = 256;          // guard bytes after the dynamic shared memory
constexpr unsigned char kUntouched = 0xc7;
constexpr uint64_t kEndOfStack = 0x746f70775f656e64;

struct Block;

struct Fibre : Thread {
  Context context;
  Block *block = nullptr;
  unsigned char *stack = nullptr;
  Place place = {"", 0};
};

// Lanes waiting at a warp function. Deposits alternate between two arrays: a fast lane may enter the next function
// while a slow one still reads.
struct Warp {
  unsigned arrived = 0;
  Place place = {"", 0};
  uint64_t turn = 0;
  uint64_t values[2][32] = {};
  Fibre *waiting[32] = {};
};

struct Block {
  std::vector<Fibre *> waiting;  // at the barrier
  std::vector<Warp> warps;
  unsigned threads = 0, live = 0;
  int votes = 0, verdict = 0;
  std::vector<unsigned char> memory;  // shared, aligned by `shared`
  unsigned char *shared = nullptr;
  size_t dynamic = 0, used = 0;
  std::vector<std::pair<const void *, size_t>> variables;  // tag and offset
};

std::vector<std::unique_ptr<Fibre>> fibres;
std::vector<Fibre *> idle, ready;
Fibre *last_ended = nullptr;  // not idle: may still run on its stack
std::vector<unsigned char *> stacks;
std::vector<std::unique_ptr<Block>> blocks, spare_blocks;  // resident; kept for their memory
std::vector<unsigned> waiting_blocks;                      // not yet resident
Launch launched;
Context outside;
const std::function<void()> *body = nullptr;
std::string failure;
uint64_t live = 0, pauses = 0, clock = 0, state = 1;
std::map<const void *, size_t> allowances;
const void *kernel_now = nullptr;

uint64_t draw() {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

Fibre *self() { return static_cast<Fibre *>(current); }

std::string written(const Place &place) {
  const std::string file = place.file;
  return file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(place.line);
}

// Abandons the launch: none of its fibres runs again.
[[noreturn]] void fail(const std::string &why) {
  if (failure.empty()) failure = why;
  Fibre *const me = self();
  current = nullptr;
  switch_to(me->context, outside);
  abort();
}

std::string deadlock() {
  std::map<std::string, unsigned> places;
  for (const auto &block : blocks) {
    for (const Fibre *fibre : block->waiting) ++places["the barrier at " + written(fibre->place)];
    for (const Warp &warp : block->warps)
      if (warp.arrived) places["the warp function at " + written(warp.place)] +=
          static_cast<unsigned>(__builtin_popcount(warp.arrived));
  }
  std::string text = std::to_string(live) + " threads wait for others that never come:";
  for (const auto &[place, count] : places) text += " " + std::to_string(count) + " at " + place + ";";
  return text;
}

// Picks a ready fibre. Odd seeds prefer the latest: a warp runs far ahead, which reveals missing barriers.
Fibre *take_ready(bool any) {
  const uint64_t drawn = draw();
  const bool last = !any && settings.seed % 2 == 1 && drawn % 64 != 0;
  const size_t chosen = last ? ready.size() - 1 : drawn / 64 % ready.size();
  Fibre *const next = ready[chosen];
  ready[chosen] = ready.back();
  ready.pop_back();
  return next;
}

// Runs other threads until this one is ready.
void wait(bool any = false) {
  Fibre *const me = self();
  if (ready.empty()) fail(deadlock());
  Fibre *const next = take_ready(any);
  if (next == me) return;
  current = next;
  switch_to(me->context, next->context);
}

void end_thread(Fibre *me);
bool start_next_block();

// Runs a thread to its end. The next block replaces a finished one.
void entry() {
  (*body)();
  Fibre *const me = self();
  Block *const block = me->block;
  end_thread(me);
  if (block->live == 0 && !waiting_blocks.empty() && !start_next_block())
    fail("there is no memory for the stacks of the threads");
  if (live == 0) {
    current = nullptr;
    switch_to(me->context, outside);
  }
  wait();
  abort();
}

bool same(const Place &a, const Place &b) {
  return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

void join_warp(const Place &place, unsigned mask, Warp &warp) {
  Fibre *const me = self();
  if (mask != kEveryLane) fail("a warp function at " + written(place) + " is called for a part of the warp");
  if (warp.arrived != 0 && !same(warp.place, place))
    fail("lanes of a warp meet at " + written(warp.place) + " and " + written(place));
  warp.place = place;
  warp.arrived |= 1u << lane();
  if (warp.arrived != kEveryLane) {
    warp.waiting[lane()] = me;
    wait();
    return;
  }
  pauses = 0;
  for (int i = 0; i < 32; ++i)
    if (i != lane()) ready.push_back(warp.waiting[i]);
  warp.arrived = 0;
  ++warp.turn;
}

Warp &own_warp() { return self()->block->warps[current->threadIdx.x / 32]; }

// Many stacks share a mapping: a process can have only some ten thousand. A mark at a stack's end detects overflow into
// the next.
unsigned char *stack_of(size_t index) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), size = page + kStacksAtOnce * kStack;
  while (stacks.size() <= index) {  // a guard page lies below the lowest
    void *const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    mprotect(memory, page, PROT_NONE);
    for (size_t i = 0; i < kStacksAtOnce; ++i)
      stacks.push_back(static_cast<unsigned char *>(memory) + page + i * kStack);
  }
  return stacks[index];
}

bool dynamic_shared_held(const Block &block) {
  const unsigned char *const behind = block.shared + block.dynamic;
  for (size_t i = 0; i < kMargin; ++i)
    if (behind[i] != kUntouched) return false;
  return true;
}

bool stack_held(const Fibre *fibre) { return memcmp(fibre->stack, &kEndOfStack, sizeof kEndOfStack) == 0; }

void end_thread(Fibre *me) {
  if (!stack_held(me)) fail("a thread wrote beyond its stack");
  if (last_ended) idle.push_back(last_ended);
  last_ended = me;
  --live;
  pauses = 0;
  Block *const block = me->block;
  if (--block->live > 0) return;
  if (!dynamic_shared_held(*block)) fail("a block wrote beyond its dynamic shared memory");
  for (auto &each : blocks) {
    if (each.get() != block) continue;
    spare_blocks.push_back(std::move(each));
    each = std::move(blocks.back());
    blocks.pop_back();
    return;
  }
}

// A fibre with a stack; null without memory.
Fibre *idle_fibre() {
  if (idle.empty()) {
    unsigned char *const stack = stack_of(fibres.size());
    if (!stack) return nullptr;
    fibres.push_back(std::make_unique<Fibre>());
    fibres.back()->stack = stack;
    idle.push_back(fibres.back().get());
  }
  Fibre *const fibre = idle.back();
  idle.pop_back();
  return fibre;
}

Block &new_block(const Launch &how) {
  if (spare_blocks.empty()) spare_blocks.push_back(std::make_unique<Block>());
  blocks.push_back(std::move(spare_blocks.back()));
  spare_blocks.pop_back();
  Block &block = *blocks.back();
  block.threads = block.live = how.threads;
  block.dynamic = how.shared;
  block.used = (how.shared + 15) / 16 * 16 + kMargin;
  block.waiting.clear();
  block.variables.clear();
  block.warps.assign(how.threads / 32, Warp());
  block.memory.resize(how.shared + kSharedByDefault + kMargin + 256);
  memset(block.memory.data(), static_cast<int>(draw() & 255), block.memory.size());  // shared memory starts undefined
  block.shared = block.memory.data() + (256 - reinterpret_cast<uintptr_t>(block.memory.data()) % 256);
  memset(block.shared + how.shared, kUntouched, kMargin);
  return block;
}

bool start_block(const Launch &how, unsigned number) {
  Block &block = new_block(how);
  for (unsigned t = 0; t < how.threads; ++t) {
    Fibre *const found = idle_fibre();
    if (!found) return false;
    Fibre &fibre = *found;
    fibre.threadIdx = {t, 0, 0};
    fibre.blockIdx = {number, 0, 0};
    fibre.blockDim = {how.threads, 1, 1};
    fibre.gridDim = {how.blocks, 1, 1};
    fibre.block = &block;
    memcpy(fibre.stack, &kEndOfStack, sizeof kEndOfStack);
    prepare(fibre.context, fibre.stack, entry);
    ready.push_back(&fibre);
    ++live;
  }
  return true;
}

bool start_next_block() {
  const unsigned number = waiting_blocks.back();
  waiting_blocks.pop_back();
  return start_block(launched, number);
}

// Runs blocks until none is left; starts one when another ends.
void run_started() {
  pauses = 0;
  Fibre *const first = take_ready(true);
  current = first;
  switch_to(outside, first->context);
  current = nullptr;
}

void clean_up() {
  ready.clear();
  waiting_blocks.clear();
  for (auto &block : blocks) spare_blocks.push_back(std::move(block));
  blocks.clear();
  idle.clear();
  last_ended = nullptr;
  for (auto &fibre : fibres) idle.push_back(fibre.get());
  live = 0;
}

unsigned resident_at_once() { return settings.resident ? settings.resident : settings.blocks; }

std::string unfit(const Launch &how) {
  if (how.threads == 0 || how.threads % 32 != 0 || how.threads > kMostThreads)
    return "a block of " + std::to_string(how.threads) + " threads";
  if (how.blocks == 0) return "a launch of no blocks";
  if (how.shared > allowed_shared(kernel_now))
    return std::to_string(how.shared) + " bytes of dynamic shared memory, but " +
           std::to_string(allowed_shared(kernel_now)) + " are allowed";
  return "";
}

}  // namespace

int barrier(const Place &place, int predicate, Vote vote) {
  Fibre *const me = self();
  Block &block = *me->block;
  me->place = place;
  if (!block.waiting.empty() && !same(block.waiting.front()->place, place))
    fail("threads of a block wait at different barriers: " + written(block.waiting.front()->place) + " and " +
         written(place));
  if (block.waiting.empty()) block.votes = 0;
  block.votes += predicate != 0;
  block.waiting.push_back(me);
  if (block.waiting.size() == block.threads) {
    const int all = static_cast<int>(block.threads);
    block.verdict = vote == Vote::any ? block.votes > 0 : vote == Vote::all ? block.votes == all : block.votes;
    pauses = 0;
    ready.insert(ready.end(), block.waiting.begin(), block.waiting.end());
    block.waiting.clear();
  }
  wait();
  return block.verdict;  // the next vote needs this thread
}

void warp_barrier(const Place &place, unsigned mask) { join_warp(place, mask, own_warp()); }

uint64_t exchange(const Place &place, unsigned mask, uint64_t value, int from) {
  Warp &warp = own_warp();
  uint64_t(&values)[32] = warp.values[warp.turn & 1];
  values[lane()] = value;
  join_warp(place, mask, warp);
  return values[from & 31];
}

unsigned ballot(const Place &place, unsigned mask, bool vote) {
  Warp &warp = own_warp();
  uint64_t(&values)[32] = warp.values[warp.turn & 1];
  values[lane()] = vote;
  join_warp(place, mask, warp);
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; ++i) votes |= static_cast<unsigned>(values[i]) << i;
  return votes;
}

void misaligned(const Place &place, size_t bytes) {
  fail("a load of " + std::to_string(bytes) + " bytes at " + written(place) + " is not aligned");
}

void *shared_variable(const void *tag, size_t bytes, size_t alignment) {
  Block &block = *self()->block;
  for (const auto &[known, offset] : block.variables)
    if (known == tag) return block.shared + offset;
  const size_t offset = (block.used + alignment - 1) / alignment * alignment;
  const size_t all = offset + bytes - kMargin, fixed = all - (block.dynamic + 15) / 16 * 16;
  const size_t limit = allowances.count(kernel_now) ? kSharedOnRequest : kSharedByDefault;
  if (fixed > kStaticAtMost || all > limit)
    fail("a block needs " + std::to_string(all) + " bytes of shared memory, " + std::to_string(fixed) +
         " of them for variables, but " + std::to_string(limit) + " and " + std::to_string(kStaticAtMost) +
         " are allowed");
  block.used = offset + bytes;
  block.variables.emplace_back(tag, offset);
  return block.shared + offset;
}

unsigned char *dynamic_shared() { return self()->block->shared; }

void yield() {
  clock += settings.tick;
  if (++pauses > kPatience * live) fail("all threads that could run wait for memory that no one writes");
  ready.push_back(self());
  wait(true);
}

uint64_t nanoseconds() { return clock; }

void trap(const char *why) { fail(why); }

void set_kernel(const void *kernel) { kernel_now = kernel; }

void allow_shared(const void *kernel, size_t bytes) {
  allowances[kernel] = bytes < kSharedOnRequest ? bytes : kSharedOnRequest;
}

size_t allowed_shared(const void *kernel) {
  const auto found = allowances.find(kernel);
  return found == allowances.end() ? kSharedByDefault : found->second;
}

const char *error() { return failure.c_str(); }

int run(const Launch &how, const std::function<void()> &kernel) {
  failure = unfit(how);
  if (!failure.empty()) return kUnlaunchable;
  body = &kernel;
  state = settings.seed * 0x9e3779b97f4a7c15u + 1;
  state = state ? state : 1;
  for (int i = 0; i < 4; ++i) draw();
  std::vector<unsigned> order(how.blocks);
  for (unsigned b = 0; b < how.blocks; ++b) order[b] = b;
  for (unsigned b = how.blocks; b > 1; --b) std::swap(order[b - 1], order[draw() % b]);
  launched = how;
  waiting_blocks = order;
  while (blocks.size() < resident_at_once() && !waiting_blocks.empty() && failure.empty())
    if (!start_next_block()) failure = "there is no memory for the stacks of the threads";
  if (failure.empty()) run_started();
  clean_up();
  return failure.empty() ? 0 : kUnlaunchable;
}

}  // namespace emulator
}  // namespace topw
