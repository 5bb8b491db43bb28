/* model/dataset_idx.c and model/gunzip.c, through model/dataset.h. */
#include "model/dataset.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/model/data_files.h"

static void put_big(struct bytes *b, uint64_t value, size_t bytes)
{
    for (size_t i = bytes; i > 0; i--) {
        unsigned char byte = (unsigned char)(value >> (8 * (i - 1)));
        put(b, &byte, 1);
    }
}

static void put_header(struct bytes *b, unsigned char type, size_t ndim, const uint32_t *dim)
{
    unsigned char magic[4] = {0, 0, type, (unsigned char)ndim};
    put(b, magic, 4);
    for (size_t i = 0; i < ndim; i++)
        put_big(b, dim[i], 4);
}

/* Five images of 2 x 3 bytes, 0, 1, 2 ..., and labels 3, 1, 4, 1, 5. */
static void make_images(struct bytes *images, struct bytes *labels)
{
    images->n = labels->n = 0;
    put_header(images, 0x08, 3, (uint32_t[]){5, 2, 3});
    for (int i = 0; i < 30; i++)
        put_big(images, (uint64_t)i * 8, 1);
    put_header(labels, 0x08, 1, (uint32_t[]){5});
    put(labels, "\3\1\4\1\5", 5);
}

struct fixture {
    Tally__V1__Idx idx;
    Tally__V1__Source source;
    struct bytes images, labels;
    char inputs[1024], targets[1024];
};

static void begin(struct fixture *f)
{
    f->idx = (Tally__V1__Idx)TALLY__V1__IDX__INIT;
    f->source = (Tally__V1__Source)TALLY__V1__SOURCE__INIT;
    f->source.kind_case = TALLY__V1__SOURCE__KIND_IDX;
    f->source.idx = &f->idx;
    snprintf(f->inputs, sizeof(f->inputs), "%s", data_path("images"));
    snprintf(f->targets, sizeof(f->targets), "%s", data_path("labels"));
    f->idx.inputs = f->inputs;
    f->idx.targets = f->targets;
    make_images(&f->images, &f->labels);
}

static void write_both(const struct fixture *f)
{
    write_bytes(f->inputs, &f->images);
    write_bytes(f->targets, &f->labels);
}

static tally_status open_set(const struct fixture *f, struct dataset **ret_set, struct tally_error *err)
{
    return dataset_open(&f->source, NULL, DATASET_CLASSES, 0, 0, ret_set, err);
}

/* Both dataset_open and, unless said otherwise, dataset_probe refuse. */
static void refused(const struct fixture *f, const char *part)
{
    struct dataset *set = NULL;
    struct dataset_info info;
    struct tally_error err;
    assert_refused(open_set(f, &set, &err), TALLY_EINVAL, &err, part);
    assert_null(set);
    assert_refused(dataset_probe(&f->source, DATASET_CLASSES, &info, &err), TALLY_EINVAL, &err, part);
}

static void check_images(const struct fixture *f, uint64_t samples)
{
    struct dataset *set = NULL;
    struct dataset_info probed = {0};
    struct tally_error err;
    assert_int_equal(dataset_probe(&f->source, DATASET_CLASSES, &probed, &err), TALLY_OK);
    assert_int_equal(open_set(f, &set, &err), TALLY_OK);
    const struct dataset_info *info = dataset_info(set);
    const struct dataset_info *both[2] = {info, &probed};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(both[i]->samples, samples);
        assert_int_equal(both[i]->input_ndim, 3);
        assert_int_equal(both[i]->input_shape[0], 1);
        assert_int_equal(both[i]->input_shape[1], 2);
        assert_int_equal(both[i]->input_shape[2], 3);
        assert_int_equal(both[i]->input_elements, 6);
        assert_int_equal(both[i]->target, DATASET_CLASSES);
        assert_int_equal(both[i]->target_elements, 1);
    }
    assert_int_equal(info->class_min, 1);
    assert_int_equal(info->class_max, samples == 5 ? 5 : 4);

    float x[3 * 16];
    int64_t targets[3];
    for (size_t i = 0; i < 48; i++)
        x[i] = -7;
    uint32_t last = (uint32_t)samples - 1;
    dataset_read(set, (uint32_t[]){last, 0, 2}, 3, x, 16, targets);
    static const unsigned char labels[] = {3, 1, 4, 1, 5};
    uint32_t read[3] = {last, 0, 2};
    for (size_t row = 0; row < 3; row++) {
        assert_int_equal(targets[row], labels[read[row]]);
        for (size_t i = 0; i < 16; i++) {
            float expected = i < 6 ? (float)((read[row] * 6 + i) * 8) / 255.0f : -7;
            assert_memory_equal(&x[row * 16 + i], &expected, sizeof(float));
        }
    }
    dataset_close(set);
}

static void test_plain_and_gzip(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    write_both(&f);
    check_images(&f, 5);
    f.idx.has_limit = true;
    f.idx.limit = 3;
    check_images(&f, 3);
    write_gzip(f.inputs, "wb9", f.images.data, f.images.n);
    write_gzip(f.targets, "wb", f.labels.data, f.labels.n);
    check_images(&f, 3);
    f.idx.limit = 5;
    check_images(&f, 5);
    f.idx.has_limit = false;
    check_images(&f, 5);
    /* Several members, as gzip allows, cut inside the header and the data. */
    write_gzip(f.inputs, "wb", f.images.data, 7);
    write_gzip(f.inputs, "ab", f.images.data + 7, 13);
    write_gzip(f.inputs, "ab", f.images.data + 20, f.images.n - 20);
    check_images(&f, 5);
}

static void test_shapes(void **state)
{
    (void)state;
    struct fixture f;
    struct dataset_info info;
    begin(&f);
    write_both(&f);
    f.images.n = 0;
    put_header(&f.images, 0x08, 2, (uint32_t[]){5, 7});
    for (int i = 0; i < 35; i++)
        put_big(&f.images, 1, 1);
    write_bytes(f.inputs, &f.images);
    assert_int_equal(dataset_probe(&f.source, DATASET_CLASSES, &info, NULL), TALLY_OK);
    assert_int_equal(info.input_ndim, 1);
    assert_int_equal(info.input_shape[0], 7);
    f.images.n = 0;
    put_header(&f.images, 0x08, 4, (uint32_t[]){5, 3, 2, 2});
    for (int i = 0; i < 60; i++)
        put_big(&f.images, 1, 1);
    write_bytes(f.inputs, &f.images);
    assert_int_equal(dataset_probe(&f.source, DATASET_CLASSES, &info, NULL), TALLY_OK);
    assert_int_equal(info.input_ndim, 3);
    assert_int_equal(info.input_shape[0], 3);
    assert_int_equal(info.input_elements, 12);
}

static void put_element(struct bytes *b, unsigned char type, double value)
{
    float single = (float)value;
    uint32_t single_bits;
    uint64_t double_bits;
    memcpy(&single_bits, &single, 4);
    memcpy(&double_bits, &value, 8);
    switch (type) {
    case 0x0d:
        put_big(b, single_bits, 4);
        break;
    case 0x0e:
        put_big(b, double_bits, 8);
        break;
    default:
        put_big(b, (uint64_t)(int64_t)value, type == 0x09 ? 1 : type == 0x0b ? 2 : 4);
    }
}

static void test_element_types(void **state)
{
    (void)state;
    static const unsigned char type[] = {0x09, 0x0b, 0x0c, 0x0d, 0x0e};
    static const double values[5][4] = {{-128, 127, 0, -1},
                                        {-32768, 32767, 256, -1},
                                        {-2147483648.0, 16777217, 65536, -1},
                                        {1.5, -0.1, 3e38, 1e-40},
                                        {1.0 / 3, -1e-300, 16777217, 2.5}};
    for (size_t t = 0; t < 5; t++) {
        struct fixture f;
        struct dataset *set = NULL;
        begin(&f);
        f.images.n = f.labels.n = 0;
        put_header(&f.images, type[t], 2, (uint32_t[]){2, 2});
        put_header(&f.labels, t < 3 ? type[t] : 0x0c, 1, (uint32_t[]){2});
        for (size_t i = 0; i < 4; i++)
            put_element(&f.images, type[t], values[t][i]);
        for (size_t i = 2; i < 4; i++)
            put_element(&f.labels, t < 3 ? type[t] : 0x0c, values[t < 3 ? t : 2][i]);
        write_both(&f);
        struct tally_error err;
        assert_int_equal(open_set(&f, &set, &err), TALLY_OK);
        assert_int_equal(dataset_info(set)->class_min, -1);
        float x[4];
        int64_t targets[2];
        dataset_read(set, (uint32_t[]){0, 1}, 2, x, 2, targets);
        for (size_t i = 0; i < 4; i++) {
            float expected = (float)values[t][i];
            assert_memory_equal(&x[i], &expected, sizeof(float));
        }
        assert_int_equal(targets[0], (int64_t)values[t < 3 ? t : 2][2]);
        assert_int_equal(targets[1], -1);
        dataset_close(set);
    }
}

static void test_refusals_of_plain_files(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    write_both(&f);
    write_data(f.inputs, "", 0);
    refused(&f, "images: not an IDX file: it has 0 bytes");
    write_data(f.inputs, "\0\0\10", 3);
    refused(&f, "it has 3 bytes");
    write_data(f.inputs, "\211PNG....", 8);
    refused(&f, "begins with 89 50 4e 47, expected 00 00");
    write_data(f.inputs, "\0\0\12\1....", 8);
    refused(&f, "begins with 00 00 0a 01");
    write_data(f.inputs, "\0\0\10\0....", 8);
    refused(&f, "has 0 dimensions, expected 1 to 4");
    write_data(f.inputs, "\0\0\10\5....", 8);
    refused(&f, "has 5 dimensions");
    write_data(f.inputs, f.images.data, 15);
    refused(&f, "ends after 15 of its header's 16 bytes");
    write_data(f.inputs, f.images.data, f.images.n - 1);
    refused(&f, "has 29 bytes of data, expected 30 for its shape (5, 2, 3) of uint8");
    put(&f.images, "x", 1);
    write_bytes(f.inputs, &f.images);
    refused(&f, "has 31 bytes of data, expected 30");
    f.images.n = 0;
    put_header(&f.images, 0x08, 3, (uint32_t[]){0, 2, 3});
    write_bytes(f.inputs, &f.images);
    refused(&f, "holds no samples: its shape is (0, 2, 3)");
    f.images.n = 0;
    put_header(&f.images, 0x0e, 4, (uint32_t[]){0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff});
    write_bytes(f.inputs, &f.images);
    refused(&f, "too large");
    f.images.n = 0;
    put_header(&f.images, 0x0e, 4, (uint32_t[]){0xffffffff, 1 << 20, 1 << 10, 1 << 10});
    write_bytes(f.inputs, &f.images);
    refused(&f, "too large");
}

static void test_refusals_of_pairs(void **state)
{
    (void)state;
    struct fixture f;
    struct dataset *set = NULL;
    struct tally_error err;
    begin(&f);
    write_both(&f);
    f.idx.has_limit = true;
    f.idx.limit = 6;
    refused(&f, "holds 5 samples, fewer than the limit of 6");
    f.idx.limit = 0;
    refused(&f, "limit is 0");
    f.idx.has_limit = false;
    /* Given the wrong way round. */
    f.idx.inputs = f.targets;
    f.idx.targets = f.inputs;
    refused(&f, "holds one number a sample, its shape is (5,)");
    begin(&f);
    f.labels.n = 0;
    put_header(&f.labels, 0x08, 1, (uint32_t[]){4});
    put(&f.labels, "\1\2\3\4", 4);
    write_both(&f);
    refused(&f, "labels 4 targets, expected as many");
    /* A limit does not hide that the files do not belong together. */
    f.idx.has_limit = true;
    f.idx.limit = 2;
    refused(&f, "images holds 5 samples");
    begin(&f);
    write_both(&f);
    write_bytes(f.targets, &f.images);
    refused(&f, "its shape is (5, 2, 3), expected one class index a sample");
    assert_refused(dataset_open(&f.source, NULL, DATASET_VALUES, 0, 0, &set, &err), TALLY_EINVAL, &err,
                   "the loss needs values");
    f.idx.targets = (char *)"labels";
    assert_refused(open_set(&f, &set, &err), TALLY_EINVAL, &err, "labels: a data file's path must be absolute here");
    f.idx.targets = f.targets;
    unlink(f.targets);
    assert_refused(open_set(&f, &set, &err), TALLY_ENOTFOUND, &err, "labels");
    f.idx.targets = (char *)"/";
    refused(&f, "/");
}

static size_t read_back(const char *path, unsigned char *data, size_t size)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    size_t n = fread(data, 1, size, file);
    fclose(file);
    return n;
}

static void test_refusals_of_gzip_files(void **state)
{
    (void)state;
    struct fixture f;
    struct dataset *set = NULL;
    struct tally_error err;
    unsigned char good[4096];
    begin(&f);
    write_both(&f);
    write_gzip(f.inputs, "wb", f.images.data, f.images.n);
    size_t n = read_back(f.inputs, good, sizeof(good));
    /* Cut off anywhere. */
    for (size_t cut = 4; cut < n; cut++) {
        write_data(f.inputs, good, cut);
        assert_refused(open_set(&f, &set, &err), TALLY_EINVAL, &err, "is cut off after");
    }
    write_data(f.inputs, good, n - 12);
    refused(&f, "images: the gzip file is cut off after");
    /* The check sum, then the length, behind the data. The probe takes a good length for good. */
    good[n - 8] ^= 1;
    write_data(f.inputs, good, n);
    assert_refused(open_set(&f, &set, &err), TALLY_EINVAL, &err,
                   "damaged gzip file: incorrect data check after 46 bytes");
    good[n - 8] ^= 1;
    good[n - 4] ^= 1;
    write_data(f.inputs, good, n);
    refused(&f, "damaged gzip file: incorrect length check");
    good[n - 4] ^= 1;
    memcpy(good + n, "abc", 3);
    write_data(f.inputs, good, n + 3);
    refused(&f, "3 bytes that are not gzip follow its data");
    /* More or less than the header declares. */
    put(&f.images, "x", 1);
    write_gzip(f.inputs, "wb", f.images.data, f.images.n);
    refused(&f, "more than 30 bytes of data, expected 30");
    write_gzip(f.inputs, "wb", f.images.data, f.images.n - 2);
    refused(&f, "has 29 bytes of data, expected 30 for its shape (5, 2, 3) of uint8");
    write_gzip(f.inputs, "wb", f.images.data, 9);
    refused(&f, "ends after 9 of its header's 16 bytes");
    write_gzip(f.inputs, "wb", "hello, world", 12);
    refused(&f, "not an IDX file: it begins with 68 65 6c 6c");
    /* With a limit no more is unpacked than is needed: damage beyond it goes unseen, but a set that is too small does
     * not. */
    begin(&f);
    f.idx.has_limit = true;
    f.idx.limit = 4;
    write_gzip(f.inputs, "wb", f.images.data, f.images.n - 6);
    assert_int_equal(open_set(&f, &set, &err), TALLY_OK);
    dataset_close(set);
    set = NULL;
    write_gzip(f.inputs, "wb", f.images.data, f.images.n - 7);
    refused(&f, "has 23 bytes of data, expected 30");
}

static void test_bombs(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    write_both(&f);
    /* Declares 4 GiB in a few bytes. */
    struct bytes b = {0};
    put_header(&b, 0x08, 3, (uint32_t[]){5, 32768, 32768});
    write_gzip(f.inputs, "wb", b.data, b.n);
    refused(&f, "cannot hold what its header declares in");
    /* Declares little and unpacks to 64 MiB. */
    static unsigned char zeros[1 << 20];
    gzFile file = gzopen(f.inputs, "wb9");
    gzwrite(file, f.images.data, (unsigned)f.images.n);
    for (int i = 0; i < 64; i++)
        gzwrite(file, zeros, sizeof(zeros));
    assert_int_equal(gzclose(file), Z_OK);
    refused(&f, "more than 30 bytes of data");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_and_gzip),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_element_types),
        cmocka_unit_test(test_refusals_of_plain_files),
        cmocka_unit_test(test_refusals_of_pairs),
        cmocka_unit_test(test_refusals_of_gzip_files),
        cmocka_unit_test(test_bombs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
