#ifndef COMMON_CLOCK_H
#define COMMON_CLOCK_H
/* Deadlines and durations are monotonic; only what a person reads is wall-clock time. */
#include <stdint.h>
#include <time.h>

static inline int64_t tally_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int64_t tally_now_us(void)
{
    return tally_now_ns() / 1000;
}

static inline int64_t tally_unix_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}
#endif
