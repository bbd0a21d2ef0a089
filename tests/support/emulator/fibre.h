// Switches between fibres, millions of times per launch. glibc's swapcontext would make two system calls each.
#ifndef TOPW_CUDA_FIBRE_H
#define TOPW_CUDA_FIBRE_H

#include <stddef.h>

#if !defined(__x86_64__) || !defined(__ELF__)
#include <ucontext.h>
#endif

namespace topw {
namespace emulator {

constexpr size_t kStack = 128 * 1024;

#if defined(__x86_64__) && defined(__ELF__)
struct Context {
  void *stack_pointer = nullptr;
};

extern "C" void topw_switch(void **saved, void *next);
asm(R"(
.text
.hidden topw_switch
.globl topw_switch
.type topw_switch, @function
topw_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size topw_switch, .-topw_switch
)");

inline void switch_to(Context &from, const Context &to) { topw_switch(&from.stack_pointer, to.stack_pointer); }

inline void prepare(Context &context, unsigned char *stack, void (*entry)()) {
  void **top = reinterpret_cast<void **>(stack + kStack) - 1;  // at entry the stack is 8 bytes off a multiple of 16
  *top = nullptr;                                              // return address of `entry`
  *--top = reinterpret_cast<void *>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}
#else
struct Context {
  ucontext_t context;
};

inline void switch_to(Context &from, const Context &to) { swapcontext(&from.context, &to.context); }

inline void prepare(Context &context, unsigned char *stack, void (*entry)()) {
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = kStack;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
}
#endif

}  // namespace emulator
}  // namespace topw
#endif
