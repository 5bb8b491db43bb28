/* model/dataset_csv.c and model/number_text.c: any text is refused with its place, or gives as many inputs as targets.
 * The input's first byte chooses the form, the second is the limit. */
#include "model/dataset_csv.h"
#include "tests/fuzz/read_array.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const targets[] = {"0", "-1", "y", "1"};
    if (size < 2)
        return 0;
    struct csv_wish wish = {.target = targets[data[0] & 3],
                            .header = data[0] & 4,
                            .classes = data[0] & 8,
                            .wish = {.limit = data[1], .probe = data[0] & 16}};
    struct data_array inputs = {0}, values = {0};
    struct tally_error err = {0};
    unsigned char *copy = malloc(size - 1);
    if (!copy)
        abort();
    memcpy(copy, data + 2, size - 2);
    if (data_csv_parse("fuzz", copy, size - 2, &wish, &inputs, &values, &err) == TALLY_OK) {
        if (inputs.samples != values.samples || inputs.samples == 0)
            abort();
        if (!wish.wish.probe) {
            fuzz_read_all(&inputs);
            fuzz_read_all(&values);
        }
    } else if (strncmp(err.message, "fuzz:", 5) != 0) {
        abort();
    }
    data_array_close(&inputs);
    data_array_close(&values);
    free(copy);
    return 0;
}
