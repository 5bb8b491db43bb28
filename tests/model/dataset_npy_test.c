/* model/dataset_npy.c, through model/dataset.h. */
#include "model/dataset.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/model/data_files.h"

struct fixture {
    Tally__V1__Npy npy;
    Tally__V1__Source source;
    char inputs[1024], targets[1024];
};

/* A file as numpy.save writes it, the header padded to 64 bytes; version 1 to 3. */
static void put_npy(struct bytes *b, int version, const char *header, const void *data, size_t n)
{
    size_t start = version == 1 ? 10 : 12, length = strlen(header) + 1;
    while ((start + length) % 64 != 0)
        length++;
    unsigned char preamble[12] = {
        0x93, 'N', 'U', 'M', 'P', 'Y', (unsigned char)version, 0, (unsigned char)length, (unsigned char)(length >> 8)};
    b->n = 0;
    put(b, preamble, start);
    put_text(b, header);
    while (b->n < start + length - 1)
        put_text(b, " ");
    put_text(b, "\n");
    put(b, data, n);
}

static void write_npy(const char *path, const char *header, const void *data, size_t n)
{
    struct bytes b;
    put_npy(&b, 1, header, data, n);
    write_bytes(path, &b);
}

/* Three samples of two float32, targets of int64. */
static const float three_inputs[6] = {1, -2, 0.5f, 3e30f, NAN, INFINITY};
static const int64_t three_targets[3] = {-100, 0, 9007199254740993};
static const char input_header[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }";
static const char target_header[] = "{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }";

static void begin(struct fixture *f)
{
    f->npy = (Tally__V1__Npy)TALLY__V1__NPY__INIT;
    f->source = (Tally__V1__Source)TALLY__V1__SOURCE__INIT;
    f->source.kind_case = TALLY__V1__SOURCE__KIND_NPY;
    f->source.npy = &f->npy;
    snprintf(f->inputs, sizeof(f->inputs), "%s", data_path("x.npy"));
    snprintf(f->targets, sizeof(f->targets), "%s", data_path("y.npy"));
    f->npy.inputs = f->inputs;
    f->npy.targets = f->targets;
    write_npy(f->inputs, input_header, three_inputs, sizeof(three_inputs));
    write_npy(f->targets, target_header, three_targets, sizeof(three_targets));
}

static struct dataset *open_set(const struct fixture *f, enum dataset_target want)
{
    struct dataset *set = NULL;
    struct tally_error err;
    struct dataset_info probed;
    if (dataset_open(&f->source, NULL, want, 0, 0, &set, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    assert_int_equal(dataset_probe(&f->source, want, &probed, &err), TALLY_OK);
    assert_int_equal(probed.samples, dataset_info(set)->samples);
    assert_int_equal(probed.input_elements, dataset_info(set)->input_elements);
    assert_int_equal(probed.target_elements, dataset_info(set)->target_elements);
    return set;
}

static void refused(const struct fixture *f, enum dataset_target want, const char *part)
{
    struct dataset *set = NULL;
    struct dataset_info info;
    struct tally_error err;
    assert_refused(dataset_open(&f->source, NULL, want, 0, 0, &set, &err), TALLY_EINVAL, &err, part);
    assert_refused(dataset_probe(&f->source, want, &info, &err), TALLY_EINVAL, &err, part);
    assert_null(set);
}

static void test_classes(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    struct dataset *set = open_set(&f, DATASET_CLASSES);
    const struct dataset_info *info = dataset_info(set);
    assert_int_equal(info->samples, 3);
    assert_int_equal(info->input_ndim, 1);
    assert_int_equal(info->input_shape[0], 2);
    assert_int_equal(info->class_min, -100);
    assert_int_equal(info->class_max, 9007199254740993);
    float x[3][4];
    int64_t targets[3];
    dataset_read(set, (uint32_t[]){2, 1, 0}, 3, x[0], 4, targets);
    for (size_t i = 0; i < 3; i++) {
        assert_memory_equal(x[2 - i], &three_inputs[2 * i], 2 * sizeof(float));
        assert_int_equal(targets[2 - i], three_targets[i]);
    }
    dataset_close(set);
}

/* One number in each type and byte order; what a float makes of it. */
static void check_type(const char *descr, const void *element, size_t bytes, float expected)
{
    struct fixture f;
    begin(&f);
    char header[128];
    snprintf(header, sizeof(header), "{'descr': '%s', 'fortran_order': False, 'shape': (1, 1), }", descr);
    write_npy(f.inputs, header, element, bytes);
    write_npy(f.targets, header, element, bytes);
    struct dataset *set = open_set(&f, DATASET_VALUES);
    assert_int_equal(dataset_info(set)->target_ndim, 1);
    float x, y;
    dataset_read(set, (uint32_t[]){0}, 1, &x, 1, &y);
    assert_memory_equal(&y, &expected, sizeof(float));
    if (strcmp(descr + 1, "u1") == 0)
        expected /= 255.0f; /* bytes are pixels, as inputs */
    assert_memory_equal(&x, &expected, sizeof(float));
    dataset_close(set);
    if (descr[1] == 'f')
        return;
    set = open_set(&f, DATASET_CLASSES);
    int64_t class;
    dataset_read(set, (uint32_t[]){0}, 1, &x, 1, &class);
    assert_true((float)class == y);
    dataset_close(set);
}

static void test_element_types(void **state)
{
    (void)state;
    check_type("|b1", "\1", 1, 1);
    check_type("|b1", "\2", 1, 1);
    check_type("|u1", "\310", 1, 200);
    check_type("|i1", "\310", 1, -56);
    check_type("<u2", "\1\310", 2, 51201);
    check_type(">u2", "\310\1", 2, 51201);
    check_type("<i2", "\1\310", 2, -14335);
    check_type(">i2", "\310\1", 2, -14335);
    check_type("<u4", "\0\1\0\310", 4, 3355443456.0f);
    check_type(">u4", "\310\0\1\0", 4, 3355443456.0f);
    check_type("<i4", "\1\0\0\376", 4, -33554431.0f);
    check_type(">i4", "\376\0\0\1", 4, -33554431.0f);
    check_type("<i8", "\376\377\377\377\377\377\377\377", 8, -2);
    check_type(">i8", "\377\377\377\377\377\377\377\376", 8, -2);
    check_type("<f4", "\315\314\314\75", 4, 0.1f);
    check_type(">f4", "\75\314\314\315", 4, 0.1f);
    check_type("<f8", "\232\231\231\231\231\231\271\77", 8, 0.1f);
    check_type(">f8", "\77\271\231\231\231\231\231\232", 8, 0.1f);
}

static void test_shapes(void **state)
{
    (void)state;
    struct fixture f;
    static const float data[24];
    begin(&f);
    write_npy(f.inputs, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 2, 2), }", data, sizeof(data));
    write_npy(f.targets, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 4), }", data, sizeof(data));
    struct dataset *set = open_set(&f, DATASET_VALUES);
    const struct dataset_info *info = dataset_info(set);
    assert_int_equal(info->input_ndim, 3);
    assert_int_equal(info->input_shape[0], 3);
    assert_int_equal(info->target_ndim, 2);
    assert_int_equal(info->target_shape[0], 3);
    assert_int_equal(info->target_shape[1], 4);
    assert_int_equal(info->target_elements, 12);
    dataset_close(set);
    /* Three dimensions stay as they are; one number a sample is a vector of one. */
    write_npy(f.inputs, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 4), }", data, sizeof(data));
    write_npy(f.targets, "{'descr': '<f4', 'fortran_order': True, 'shape': (2,), }", data, 8);
    set = open_set(&f, DATASET_VALUES);
    info = dataset_info(set);
    assert_int_equal(info->input_ndim, 2);
    assert_int_equal(info->input_shape[0], 3);
    assert_int_equal(info->target_ndim, 1);
    assert_int_equal(info->target_shape[0], 1);
    dataset_close(set);
    /* Class indices as a column. */
    static const int32_t column[2] = {7, 1};
    write_npy(f.targets, "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 1), }", column, 8);
    set = open_set(&f, DATASET_CLASSES);
    assert_int_equal(dataset_info(set)->class_max, 7);
    dataset_close(set);
    f.npy.has_limit = true;
    f.npy.limit = 1;
    write_npy(f.targets, "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 1), }", (int32_t[]){1, 7}, 8);
    set = open_set(&f, DATASET_CLASSES);
    assert_int_equal(dataset_info(set)->samples, 1);
    assert_int_equal(dataset_info(set)->class_max, 1);
    dataset_close(set);
}

static void test_headers_that_are_right(void **state)
{
    (void)state;
    static const char *const headers[] = {
        "{\"shape\":(3,2),\"fortran_order\":False,\"descr\":\"<f4\"}",
        "{ 'shape' : ( 3 , 2 , ) , 'descr' : '<f4' , 'fortran_order' : False , }",
    };
    for (size_t i = 0; i < 2; i++)
        for (int version = 1; version <= 3; version++) {
            struct fixture f;
            struct bytes b;
            begin(&f);
            put_npy(&b, version, headers[i], three_inputs, sizeof(three_inputs));
            write_bytes(f.inputs, &b);
            struct dataset *set = open_set(&f, DATASET_CLASSES);
            float x[2];
            int64_t class;
            dataset_read(set, (uint32_t[]){1}, 1, x, 2, &class);
            assert_memory_equal(x, three_inputs + 2, sizeof(x));
            dataset_close(set);
        }
}

static void test_headers_that_are_wrong(void **state)
{
    (void)state;
    static const struct {
        const char *header, *part;
    } wrong[] = {
        {"", "its npy header ends where '{' was expected"},
        {"{", "ends where a key was expected"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2)", "ends where a comma or '}' was expected"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2)} x", "has 'x' where its end was expected"},
        {"{'descr': '<f4', 'fortran_order': False}", "its npy header has no shape"},
        {"{'descr': '<f4', 'shape': (3, 2)}", "has no fortran_order"},
        {"{'fortran_order': False, 'shape': (3, 2)}", "has no descr"},
        {"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (3, 2)}", "has the key 'descr' twice"},
        {"{'descr': '<f4', 'order': False, 'shape': (3, 2)}", "has the key 'order' beside"},
        {"{'descr': '<f4', 'fortran_order': 0, 'shape': (3, 2)}", "has '0' where True or False was expected"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': 3}", "has '3' where the shape, a tuple was expected"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (6)}", "has ')' where a comma was expected"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3 2)}", "has '2' where a comma was expected"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (-3, 2)}", "has '-' where a dimension was expected"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3L, 2)}", "has 'L' where a comma was expected"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': ()}", "holds a single number"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1, 3, 2)}", "has more than 4 dimensions"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999, 2)}", "a dimension"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 2)}", "is too large"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4294967296, 4294967296)}", "is too large"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 0)}", "holds no numbers: its shape is (3, 0)"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 2)}", "holds no samples: its shape is (0, 2)"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (6,)}", "holds one number a sample, its shape is (6,)"},
        {"{'descr': '<f4', 'fortran_order': True, 'shape': (3, 2)}", "is in Fortran order"},
        {"{'descr': '<f2', 'fortran_order': False, 'shape': (3, 2)}", "its elements are '<f2' (float16), expected"},
        {"{'descr': '<f16', 'fortran_order': False, 'shape': (3, 2)}", "'<f16' (floats of another size"},
        {"{'descr': '<u8', 'fortran_order': False, 'shape': (3, 2)}", "'<u8' (unsigned 64-bit integers)"},
        {"{'descr': '<c8', 'fortran_order': False, 'shape': (3, 2)}", "'<c8' (complex numbers)"},
        {"{'descr': '|O', 'fortran_order': False, 'shape': (3, 2)}", "'|O' (Python objects)"},
        {"{'descr': '<U7', 'fortran_order': False, 'shape': (3, 2)}", "'<U7' (strings)"},
        {"{'descr': '|f4', 'fortran_order': False, 'shape': (3, 2)}", "'|f4'"},
        {"{'descr': '', 'fortran_order': False, 'shape': (3, 2)}", "'' (an unknown type)"},
        {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3, 2)}", "records of several fields"},
        {"{'descr': 4, 'fortran_order': False, 'shape': (3, 2)}", "has '4' where the element type, a string"},
        {"{'descr': '<f4\\'', 'fortran_order': False, 'shape': (3, 2)}", "where the end of a short string"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 3)}",
         "has 24 bytes of data, expected 36 for its shape (3, 3) of float32"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2)}", "has 24 bytes of data, expected 16"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}", "x.npy holds 2 samples and"},
    };
    struct fixture f;
    begin(&f);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        write_npy(f.inputs, wrong[i].header, three_inputs, sizeof(three_inputs));
        refused(&f, DATASET_CLASSES, wrong[i].part);
    }
}

static void test_files_that_are_wrong(void **state)
{
    (void)state;
    struct fixture f;
    struct bytes b;
    begin(&f);
    put_npy(&b, 1, input_header, three_inputs, sizeof(three_inputs));
    write_data(f.inputs, "", 0);
    refused(&f, DATASET_CLASSES, "x.npy: not an npy file: it is empty");
    for (size_t n = 1; n < b.n; n++) {
        write_data(f.inputs, b.data, n);
        refused(&f, DATASET_CLASSES,
                n < 10                          ? "not an npy file"
                : n < b.n - sizeof three_inputs ? "inside its npy header"
                                                : "bytes of data, expected 24");
    }
    put(&b, "x", 1);
    write_bytes(f.inputs, &b);
    refused(&f, DATASET_CLASSES, "has 25 bytes of data, expected 24");
    b.n--;
    b.data[6] = 4;
    write_bytes(f.inputs, &b);
    refused(&f, DATASET_CLASSES, "npy format 4.0, expected 1.0, 2.0 or 3.0");
    b.data[6] = 1;
    b.data[9] = 0x80;
    write_bytes(f.inputs, &b);
    refused(&f, DATASET_CLASSES, "bytes, expected at most 10000");
    write_data(f.inputs, "PK\3\4 an npz file", 16);
    refused(&f, DATASET_CLASSES, "does not begin with \\x93NUMPY");
}

static void test_targets_that_are_wrong(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    write_npy(f.targets, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", three_inputs, 12);
    refused(&f, DATASET_CLASSES, "y.npy: its elements are float32, expected class indices, integers");
    write_npy(f.targets, "{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }", three_inputs, 24);
    refused(&f, DATASET_CLASSES, "y.npy: its shape is (3, 2), expected one class index a sample");
    f.npy.has_limit = true;
    f.npy.limit = 4;
    refused(&f, DATASET_CLASSES, "holds 3 samples, fewer than the limit of 4");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_classes),
        cmocka_unit_test(test_element_types),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_headers_that_are_right),
        cmocka_unit_test(test_headers_that_are_wrong),
        cmocka_unit_test(test_files_that_are_wrong),
        cmocka_unit_test(test_targets_that_are_wrong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
