#ifndef TESTS_WORKER_EVAL_TABLE_H
#define TESTS_WORKER_EVAL_TABLE_H
/* What the evaluations of a job came to, and how often each micro-batch was run; ranks on several threads write to one.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "kernels/kernels.h"

#define EVAL_VERSIONS_MAX 32
#define EVAL_LEAVES_MAX 64

struct eval_cell {
    unsigned times;
    struct kernel_loss loss;
    uint32_t samples;
};

struct eval_table {
    pthread_mutex_t mutex;
    struct eval_cell cells[EVAL_VERSIONS_MAX][EVAL_LEAVES_MAX];
};

static inline void eval_table_add(struct eval_table *table, uint64_t version, uint32_t micro_batch,
                                  const struct kernel_loss *loss, uint32_t samples)
{
    if (version >= EVAL_VERSIONS_MAX || micro_batch >= EVAL_LEAVES_MAX)
        abort();
    pthread_mutex_lock(&table->mutex);
    struct eval_cell *cell = &table->cells[version][micro_batch];
    cell->times++;
    cell->loss = *loss;
    cell->samples = samples;
    pthread_mutex_unlock(&table->mutex);
}
#endif
