#ifndef KERNELS_CPU_CPU_H
#define KERNELS_CPU_CPU_H
#include "kernels/kernels.h"

/* The backend that computes on the calling thread. */
extern const struct kernels cpu_kernels;
#endif
