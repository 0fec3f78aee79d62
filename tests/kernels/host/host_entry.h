// What ctypes calls: the kernels of the text before, with the arguments of a CUDA launch.

#pragma once

extern "C" void launch_rotate_scatter(const unsigned* grid, const unsigned* block, void** args) {
  host::launch<rotate_scatter>(grid, block, args, false);
}
extern "C" void launch_gather_unrotate(const unsigned* grid, const unsigned* block, void** args) {
  host::launch<gather_unrotate>(grid, block, args, SCALED);
}
extern "C" int count_rotate_scatter() { return host::Caller<rotate_scatter>::count(); }
extern "C" int count_gather_unrotate() { return host::Caller<gather_unrotate>::count(); }
extern "C" int size_rotate_scatter(int i) { return host::Caller<rotate_scatter>::size(i); }
extern "C" int size_gather_unrotate(int i) { return host::Caller<gather_unrotate>::size(i); }
