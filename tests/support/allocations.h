#ifndef TESTS_SUPPORT_ALLOCATIONS_H
#define TESTS_SUPPORT_ALLOCATIONS_H
/* Counts every way to ask for memory, or give it back, in the whole process: what is linked with this takes the place
 * of libc's functions. */
#include <stdbool.h>

/* false under a sanitizer, which has taken their place already: the count stays 0. */
bool allocations_counted(void);
unsigned long allocations(void);
#endif
