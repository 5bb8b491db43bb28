#ifndef COMMON_CHECK_H
#define COMMON_CHECK_H
/* An assertion that holds in release builds too: for what would otherwise corrupt weights. */
#include <stdio.h>
#include <stdlib.h>

#define tally_check(condition) ((condition) ? (void)0 : tally_check_failed(#condition, __FILE__, __LINE__))

_Noreturn static inline void tally_check_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "%s:%d: a check failed: %s\n", file, line, condition);
    abort();
}
#endif
