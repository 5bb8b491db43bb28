/* model/dataset_csv.c, through model/dataset.h. */
#include "model/dataset.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/model/data_files.h"

struct fixture {
    Tally__V1__Csv csv;
    Tally__V1__Source source;
    char path[1024];
};

static void begin(struct fixture *f, const char *target, bool header, const char *text)
{
    f->csv = (Tally__V1__Csv)TALLY__V1__CSV__INIT;
    f->source = (Tally__V1__Source)TALLY__V1__SOURCE__INIT;
    f->source.kind_case = TALLY__V1__SOURCE__KIND_CSV;
    f->source.csv = &f->csv;
    snprintf(f->path, sizeof(f->path), "%s", data_path("d.csv"));
    f->csv.path = f->path;
    f->csv.target = (char *)(uintptr_t)target;
    f->csv.header = header;
    write_data(f->path, text, strlen(text));
}

/* Opens, compares all rows of two inputs and a target with expected (rows x 3), and closes. */
static void check_as(const struct fixture *f, enum dataset_target want, size_t rows, const float *expected)
{
    struct dataset *set = NULL;
    struct tally_error err;
    struct dataset_info probed;
    if (dataset_open(&f->source, NULL, want, 0, 0, &set, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    assert_int_equal(dataset_probe(&f->source, want, &probed, &err), TALLY_OK);
    const struct dataset_info *info = dataset_info(set);
    assert_int_equal(info->samples, rows);
    assert_int_equal(probed.samples, rows);
    assert_int_equal(info->input_ndim, 1);
    assert_int_equal(info->input_shape[0], 2);
    assert_int_equal(probed.input_elements, 2);
    assert_int_equal(info->target_elements, 1);
    for (uint32_t i = 0; i < rows; i++) {
        float x[2], value;
        int64_t class;
        dataset_read(set, &i, 1, x, 2, want == DATASET_CLASSES ? (void *)&class : &value);
        assert_memory_equal(x, expected + 3 * i, sizeof(x));
        if (want == DATASET_CLASSES)
            value = (float)class;
        assert_memory_equal(&value, &expected[3 * i + 2], sizeof(value));
    }
    dataset_close(set);
}

static void check(const char *target, bool header, const char *text, size_t rows, const float *expected)
{
    struct fixture f;
    begin(&f, target, header, text);
    check_as(&f, DATASET_CLASSES, rows, expected);
    check_as(&f, DATASET_VALUES, rows, expected);
}

static void test_target_column(void **state)
{
    (void)state;
    static const float first[] = {2, 3, 1, 5, 6, 4}, middle[] = {1, 3, 2, 4, 6, 5}, last[] = {1, 2, 3, 4, 5, 6};
    static const char text[] = "a,b,c\n1,2,3\n4,5,6\n";
    check("a", true, text, 2, first);
    check("b", true, text, 2, middle);
    check("c", true, text, 2, last);
    check("0", true, text, 2, first);
    check("-1", true, text, 2, last);
    check("-2", true, text, 2, middle);
    check("-3", false, text + 6, 2, first);
    check("2", false, text + 6, 2, last);
    /* A name that looks like an index is a name. */
    check("2", true, "2,1,0\n1,2,3\n4,5,6\n", 2, first);
}

static void test_forms(void **state)
{
    (void)state;
    static const float expected[] = {1, -2.5f, 3, 0.1f, 1e-7f, 0};
    static const char *const texts[] = {
        "a,b,y\n1,-2.5,3\n.1,1e-7,0\n",
        "a,b,y\n1,-2.5,3\n.1,1e-7,0",
        "a,b,y\r\n1,-2.5,3\r\n.1,1e-7,0\r\n",
        "a,b,y\r\n1,-2.5,3\r\n.1,1e-7,0\r",
        "\xef\xbb\xbf"
        "a,b,y\n1,-2.5,3\n.1,1e-7,0\n\n\r\n  \n",
        " a , b ,\ty\n 1 ,\t-2.5 , 3 \n.1, 1E-07 ,+0 \n",
        "\"a\",\"b\",\"y\"\n\"1\",\"-2.5\",\"3\"\n\".1\",1e-7,\"0\"\n",
        "\"a, the \"\"first\"\"\nof them\",b, \"y\" \n1,-2.50,3.0\n0.1,0.0000001,0e5\n",
    };
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        check("y", true, texts[i], 2, expected);
    check("say \"y\"", true, "a,b,\"say \"\"y\"\"\"\n1,-2.5,3\n.1,1e-7,0\n", 2, expected);
}

static void test_many_rows_and_limit(void **state)
{
    (void)state;
    enum { ROWS = 1000 };
    static char text[ROWS * 32];
    static float expected[ROWS * 3];
    size_t n = (size_t)snprintf(text, sizeof(text), "a,b,y\n");
    for (size_t i = 0; i < ROWS; i++) {
        n += (size_t)snprintf(text + n, sizeof(text) - n, "%zu,%zu.25,%zu\n", i, i * 7, i % 10);
        expected[3 * i] = (float)i;
        expected[3 * i + 1] = (float)(i * 7) + 0.25f;
        expected[3 * i + 2] = (float)(i % 10);
    }
    check("y", true, text, ROWS, expected);
    struct fixture f;
    begin(&f, "y", true, text);
    f.csv.has_limit = true;
    for (size_t limit = 1; limit <= ROWS; limit += 333) {
        f.csv.limit = limit;
        check_as(&f, DATASET_CLASSES, limit, expected);
    }
    /* What is beyond the limit is not read. */
    begin(&f, "y", true, "a,b,y\n1,2,3\nand so on\n");
    f.csv.has_limit = true;
    f.csv.limit = 1;
    check_as(&f, DATASET_CLASSES, 1, (float[]){1, 2, 3});
}

static void test_negative_classes(void **state)
{
    (void)state;
    struct fixture f;
    struct dataset *set = NULL;
    begin(&f, "y", true, "a,y\n1,-100\n2,7\n");
    assert_int_equal(dataset_open(&f.source, NULL, DATASET_CLASSES, 0, 0, &set, NULL), TALLY_OK);
    assert_int_equal(dataset_info(set)->class_min, -100);
    assert_int_equal(dataset_info(set)->class_max, 7);
    dataset_close(set);
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *target;
        bool header;
        const char *text, *part;
    } wrong[] = {
        {"y", true, "", "d.csv: is empty, expected a header and a line a sample"},
        {"0", false, " \n\n", "d.csv: is empty, expected a line a sample"},
        {"y", true, "a,y\n", "d.csv: has a header and no samples"},
        {"y", true,
         "\xff\xfe"
         "a",
         "is UTF-16 text"},
        {"y", true, "y\n1\n", "its lines have one column"},
        {"0", false, "1;2;3\n", "its lines have one column"},
        {"z", true, "a,b,y\n1,2,3\n", "its header has no column 'z', only 'a', 'b', 'y'"},
        {"lable", true, "a,label\n1,2\n",
         "its header has no column 'lable', only 'a', 'label' (did you mean 'label'?)"},
        {"y", true, "y,y\n1,2\n", "its header has 2 columns named 'y'"},
        {"y", false, "1,2\n", "without a header the target is a column's index, not the name 'y'"},
        {"2", false, "1,2\n", "has 2 columns, so the target's index is from -2 to 1, not 2"},
        {"-3", false, "1,2\n", "from -2 to 1, not -3"},
        {"99999999999999999999", false, "1,2\n", "from -2 to 1, not 99999999999999999999"},
        {"-", true, "1,2\n", "its header has no column '-'"},
        {"y", true, "a,y\n1,2\n1,cat\n", "d.csv:3:3: column 1 ('y'): found 'cat', expected a number"},
        {"y", true, "a,y\n1,2\n,2\n", "d.csv:3:1: column 0 ('a'): found nothing, expected a number"},
        {"y", true, "a,y\n1,2\n1, \n", "d.csv:3:4: column 1 ('y'): found nothing, expected a number"},
        {"1", false, "1,2\n1, 0x10\n", "d.csv:2:4: column 1: found '0x10', expected a number"},
        {"y", true, "a,y\nnan,2\n", "d.csv:2:1: column 0 ('a'): found 'nan', expected a number"},
        {"y", true, "a,y\n1,inf\n", "d.csv:2:3: column 1 ('y'): found 'inf', expected a number"},
        {"y", true, "a,y\n1e39,2\n", "found '1e39', expected a number within float32's range"},
        {"y", true, "a,y\n1,2.5\n", "d.csv:2:3: column 1 ('y'): found '2.5', expected a class index, an integer"},
        {"y", true, "a,y\n1,1e30\n", "found '1e30', expected a class index"},
        {"y", true, "a,b,y\n1,2,3\n4,5\n", "d.csv:3:3: the line has only 2 fields, expected 3"},
        {"y", true, "a,b,y\n1,2,3\n4,5,6,7\n", "d.csv:3:5: the line has more than 3 fields, expected 3"},
        {"y", true, "a,b,y\n1,2,3,\n", "d.csv:2:5: the line has more than 3 fields, expected 3"},
        {"y", true, "a,b,y\n1,2,3\n\n4,5,6\n", "d.csv:3:1: an empty line, expected 3 fields"},
        {"y", true, "a,y\n1,\"2\n3,4\n", "d.csv:2:3: the quote that opens here is never closed"},
        {"y", true, "a,\"y\n1,2\n", "d.csv:1:3: the quote that opens here is never closed"},
        {"y", true, "a,y\n\"1\"2,3\n", "d.csv:2:4: expected a comma behind the closing quote"},
        {"y", true, "\"a\n\",y\n1,x\n", "d.csv:3:3: column 1 ('y'): found 'x'"},
        {"y", true, "a,y\r1,2\r3,4", "its header has no column 'y'"},
        {"y", true, "a,y\n1,\x01\xc3\xa4'\n", "found '\?\?\?'', expected"},
        {"y", true, "a,y\n1,a very very very very very very very very long text\n",
         "found 'a very very very very very very very very...', expected"},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct fixture f;
        struct dataset *set = NULL;
        struct dataset_info info;
        struct tally_error err;
        begin(&f, wrong[i].target, wrong[i].header, wrong[i].text);
        assert_refused(dataset_open(&f.source, NULL, DATASET_CLASSES, 0, 0, &set, &err), TALLY_EINVAL, &err,
                       wrong[i].part);
        assert_refused(dataset_probe(&f.source, DATASET_CLASSES, &info, &err), TALLY_EINVAL, &err, wrong[i].part);
    }
    struct fixture f;
    struct dataset_info info;
    struct tally_error err;
    begin(&f, "y", true, "a,y\n1,2\n3,4\n");
    f.csv.has_limit = true;
    f.csv.limit = 3;
    assert_refused(dataset_probe(&f.source, DATASET_CLASSES, &info, &err), TALLY_EINVAL, &err,
                   "d.csv: holds 2 samples, fewer than the limit of 3");
    unlink(f.path);
    assert_refused(dataset_probe(&f.source, DATASET_CLASSES, &info, &err), TALLY_ENOTFOUND, &err, "d.csv");
    f.csv.path = (char *)"d.csv";
    assert_refused(dataset_probe(&f.source, DATASET_CLASSES, &info, &err), TALLY_EINVAL, &err, "must be absolute");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_target_column),
        cmocka_unit_test(test_forms),
        cmocka_unit_test(test_many_rows_and_limit),
        cmocka_unit_test(test_negative_classes),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
