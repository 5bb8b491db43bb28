#ifndef CLIENT_RESULT_FILE_H
#define CLIENT_RESULT_FILE_H
/* Takes a result file of a job from the coordinator (Jobs.Results). The file appears whole, with the bytes that were
 * promised, or not at all. */
#include <stdint.h>

#include "common/error.h"
#include "proto/rpc.h"

struct result_file;

/* Called once, on the queue's thread; the result_file is gone then. end->code TALLY_OK: the file is at its path. */
typedef void (*result_file_done)(const struct tally_error *end, void *user);

/* sha256: hexadecimal, of the weights' bytes, which are the file's data section. All strings are copied. */
tally_status result_file_get(struct rpc_channel *channel, struct rpc_queue *queue, uint64_t job, const char *name,
                             const char *path, const char *sha256, result_file_done done, void *user,
                             struct result_file **ret_file, struct tally_error *err);
/* Has done called soon, with TALLY_ECANCELLED unless the end was already on its way. */
void result_file_cancel(struct result_file *file);
#endif
