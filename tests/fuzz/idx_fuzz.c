/* model/dataset_idx.c and model/gunzip.c: any bytes are refused, or are an array whose every element can be read. The
 * input's first byte is the limit. */
#include "model/dataset_array.h"
#include "tests/fuzz/read_array.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size > 0)
        fuzz_parse(data_idx_parse, data[0], data + 1, size - 1);
    return 0;
}
