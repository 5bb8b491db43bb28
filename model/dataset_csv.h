#ifndef MODEL_DATASET_CSV_H
#define MODEL_DATASET_CSV_H
/* Inside model/dataset*.c: comma-separated numbers (RFC 4180), decoded into two arrays. */
#include "model/dataset_array.h"

struct csv_wish {
    const char *target; /* a name of the header, or an index */
    bool header;
    bool classes;          /* the target is a class index, int64; else a value, float32 */
    struct data_wish wish; /* probe: everything is read and checked, nothing kept */
};

/* inputs: (samples, columns - 1) float32 in the file's order; targets: (samples, 1). Errors begin with
 * FILE:LINE:COLUMN. */
tally_status data_csv_parse(const char *name, const unsigned char *text, size_t bytes, const struct csv_wish *wish,
                            struct data_array *ret_inputs, struct data_array *ret_targets, struct tally_error *err);
#endif
