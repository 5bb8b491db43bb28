/* A step allocates nothing: every way to ask for memory is counted while executors run. The definitions here take the
 * place of libc's in the whole process. */
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/worker/memory_hub.h"
#include "tests/worker/random_job.h"
#include "tests/worker/test_job.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS false /* the sanitizer has taken their place already */
#else
#define COUNTS true

static atomic_ulong allocations;

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *p);

void *malloc(size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(n, bytes);
}

void *realloc(void *p, size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(p, bytes);
}

void free(void *p)
{
    atomic_fetch_add(&allocations, p != NULL); /* a step that frees has allocated */
    __libc_free(p);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
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
    atomic_fetch_add(&allocations, 1);
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}
#endif

static unsigned long count(void)
{
#if COUNTS
    return atomic_load(&allocations);
#else
    return 0;
#endif
}

/* Takes the spec. */
static void check_steps(Tally__V1__JobSpec *spec)
{
    struct test_job *job = test_job_open(spec);
    struct test_rank rank[2];
    struct transport *transport[2];
    for (uint32_t r = 0; r < 2; r++)
        test_rank_open(job, r, 2, NULL, &rank[r]);
    struct memory_hub *hub;
    struct tally_error err;
    assert_int_equal(memory_hub_open(rank[0].plan, &(struct memory_hub_options){.clients = 2}, &hub, &err), TALLY_OK);
    for (uint32_t r = 0; r < 2; r++)
        transport[r] = memory_hub_join(hub, r, executor_weights(rank[r].executor));
    uint64_t steps = rank[0].plan->batches.steps;
    unsigned long before = count();
    for (uint64_t step = 1; step <= steps; step++)
        for (uint32_t r = 0; r < 2; r++)
            if (executor_step(rank[r].executor, transport[r], step, &err))
                abort(); /* fail_msg would allocate */
    unsigned long after = count();
    assert_int_equal(after - before, 0);
    memory_hub_close(hub);
    for (uint32_t r = 0; r < 2; r++)
        test_rank_close(&rank[r]);
    test_job_close(job);
}

static void test_counts(void **state)
{
    (void)state;
    if (!COUNTS)
        skip();
    unsigned long before = count();
    void *volatile p = malloc(10);
    free(p);
    assert_true(count() - before >= 2);
    before = count();
    void *volatile page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(page, 4096);
    assert_true(count() - before >= 1);
}

/* From the first step on, over epochs, with accumulation and short micro-batches. */
static void test_steps_allocate_nothing(void **state)
{
    (void)state;
    if (!COUNTS)
        skip();
    for (uint64_t seed = 300; seed < 320; seed++)
        check_steps(random_job(seed, &(struct random_options){.steps = 8}));
}

static void test_steps_of_a_cnn_allocate_nothing(void **state)
{
    (void)state;
    if (!COUNTS)
        skip();
    Tally__V1__JobSpec *spec = spec_new(3, 32, 8, 0, 3);
    spec_synthetic(spec, 0, 80, 10, (const uint32_t[]){1, 28, 28}, 3, NULL, 0);
    spec_conv(spec, "conv1", 20, 5, 1, 0, 1);
    spec_max_pool(spec, NULL, 2, 2, 0);
    spec_conv(spec, "conv2", 50, 5, 1, 0, 1);
    spec_max_pool(spec, NULL, 2, 2, 0);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_FLATTEN);
    spec_linear(spec, "fc1", 500, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "fc2", 10, true);
    spec_cross_entropy(spec, -100, 0);
    check_steps(spec);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_steps_allocate_nothing),
        cmocka_unit_test(test_steps_of_a_cnn_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
