#include "tests/support/allocations.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_ulong count;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
bool allocations_counted(void)
{
    return false;
}
#else
bool allocations_counted(void)
{
    return true;
}

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *p);

void *malloc(size_t bytes)
{
    atomic_fetch_add(&count, 1);
    return __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    atomic_fetch_add(&count, 1);
    return __libc_calloc(n, bytes);
}

void *realloc(void *p, size_t bytes)
{
    atomic_fetch_add(&count, 1);
    return __libc_realloc(p, bytes);
}

void free(void *p)
{
    atomic_fetch_add(&count, p != NULL);
    __libc_free(p);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    atomic_fetch_add(&count, 1);
    return __libc_memalign(alignment, bytes);
}

void *memalign(size_t alignment, size_t bytes)
{
    return aligned_alloc(alignment, bytes);
}

int posix_memalign(void **ret, size_t alignment, size_t bytes)
{
    *ret = aligned_alloc(alignment, bytes);
    return *ret ? 0 : 12;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
{
    atomic_fetch_add(&count, 1);
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}
#endif

unsigned long allocations(void)
{
    return atomic_load(&count);
}
