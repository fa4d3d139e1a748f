// Switching from one stack to another in some instructions; swapcontext() would cost a system call.
#pragma once

// Saves the callee-saved registers on the running stack and its pointer in `*from`, and goes on where `to`
// was saved so, or prepared by prepare_stack().
extern "C" void streamllm_switch_stack(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.weak streamllm_switch_stack
.type streamllm_switch_stack, @function
streamllm_switch_stack:
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
.size streamllm_switch_stack, .-streamllm_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(
.text
.weak streamllm_switch_stack
.type streamllm_switch_stack, %function
streamllm_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size streamllm_switch_stack, .-streamllm_switch_stack
)");
#else
#error "the emulation knows how to switch stacks on x86-64 and aarch64"
#endif

namespace streamllm::emulation {

// A stack pointer that streamllm_switch_stack() can go to: it calls `entry`, which must not return.
inline void* prepare_stack(void* stack_end, void (*entry)()) {
  void** top = static_cast<void**>(stack_end);
#if defined(__x86_64__)
  constexpr int kSavedRegisters = 6;
  top -= 2;  // a return address for `entry`, of which there is none; it also aligns the stack
  top[1] = nullptr;
  top[0] = reinterpret_cast<void*>(entry);
  top -= kSavedRegisters;
  for (int i = 0; i < kSavedRegisters; ++i) top[i] = nullptr;
#else
  constexpr int kSavedWords = 20, kLinkRegister = 11;
  top -= kSavedWords;
  for (int i = 0; i < kSavedWords; ++i) top[i] = nullptr;
  top[kLinkRegister] = reinterpret_cast<void*>(entry);
#endif
  return top;
}

}  // namespace streamllm::emulation
