/* A job's data on this machine: what must fit what the job was submitted with, and wrong class targets by name. */
#include "worker/job_data.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/worker/test_job.h"

#define SAMPLES 200

static char directory[64], inputs[128], targets[128];

static void write_npy(const char *path, const char *header, const void *data, size_t bytes)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    char text[118];
    memset(text, ' ', sizeof text);
    memcpy(text, header, strlen(header));
    text[sizeof text - 1] = '\n';
    const unsigned char magic[] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, sizeof text, 0};
    assert_int_equal(fwrite(magic, sizeof magic, 1, f), 1);
    assert_int_equal(fwrite(text, sizeof text, 1, f), 1);
    assert_int_equal(fwrite(data, bytes, 1, f), 1);
    assert_int_equal(fclose(f), 0);
}

/* SAMPLES samples of 3 features with class 0, but for one. */
static void write_set(size_t index, int64_t target)
{
    float x[SAMPLES * 3];
    int64_t y[SAMPLES] = {0};
    for (size_t i = 0; i < SAMPLES * 3; i++)
        x[i] = (float)i;
    y[index] = target;
    write_npy(inputs, "{'descr': '<f4', 'fortran_order': False, 'shape': (200, 3), }", x, sizeof x);
    write_npy(targets, "{'descr': '<i8', 'fortran_order': False, 'shape': (200,), }", y, sizeof y);
}

static Tally__V1__JobSpec *make_spec(int64_t ignore_index)
{
    Tally__V1__JobSpec *spec = spec_new(1, 8, 8, 1, 0);
    spec_npy(spec, 0, inputs, targets, 0);
    spec_npy(spec, 1, inputs, targets, 0);
    spec_linear(spec, NULL, 4, true);
    spec_cross_entropy(spec, ignore_index, 0);
    return spec;
}

static tally_status open_set(int64_t ignore_index, struct tally_error *err)
{
    struct test_job *job = test_job_open(make_spec(ignore_index));
    struct job_data data = {0};
    tally_status status = job_data_open(job->model, &job->facts, &data, err);
    assert_int_equal(data.train != NULL, status == TALLY_OK);
    assert_int_equal(data.test != NULL, status == TALLY_OK);
    job_data_close(&data);
    test_job_close(job);
    return status;
}

static void test_good_targets(void **state)
{
    (void)state;
    struct tally_error err;
    write_set(150, 3);
    assert_int_equal(open_set(-100, &err), TALLY_OK);
}

static void test_wrong_targets(void **state)
{
    (void)state;
    struct tally_error err;
    write_set(150, 4);
    assert_int_equal(open_set(-100, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "data.train: the target of sample 150 is 4, but the model has classes 0 to 3");
    write_set(0, -1);
    assert_int_equal(open_set(-100, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "data.train: the target of sample 0 is -1, but the model has classes 0 to 3");
    write_set(199, INT64_MIN);
    assert_int_equal(open_set(-100, &err), TALLY_EINVAL);
}

static void test_ignored_targets(void **state)
{
    (void)state;
    struct tally_error err;
    write_set(70, -100);
    assert_int_equal(open_set(-100, &err), TALLY_OK);
    assert_int_equal(open_set(-1, &err), TALLY_EINVAL);
    write_set(70, 255);
    assert_int_equal(open_set(255, &err), TALLY_OK);
}

static void test_other_data_than_submitted(void **state)
{
    (void)state;
    struct tally_error err;
    write_set(0, 1);
    struct test_job *job = test_job_open(make_spec(-100));
    struct job_data data;
    job->facts.test_samples = 199;
    assert_int_equal(job_data_open(job->model, &job->facts, &data, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "data.test: 200 samples here, 199 when the job was submitted");
    job->facts.test_samples = 0; /* no evaluation would be planned for it */
    assert_int_equal(job_data_open(job->model, &job->facts, &data, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "data.test: is given, but 0 samples were counted");
    job->facts.test_samples = 200;
    job->input_shape[0] = 5;
    assert_int_equal(job_data_open(job->model, &job->facts, &data, &err), TALLY_EINVAL);
    assert_non_null(strstr(err.message, "data.train: the samples here have another shape"));
    test_job_close(job);
}

static int make_directory(void **state)
{
    (void)state;
    snprintf(directory, sizeof directory, "/tmp/tally-job-data-XXXXXX");
    if (!mkdtemp(directory))
        return -1;
    snprintf(inputs, sizeof inputs, "%s/x.npy", directory);
    snprintf(targets, sizeof targets, "%s/y.npy", directory);
    return 0;
}

static int remove_directory(void **state)
{
    (void)state;
    unlink(inputs);
    unlink(targets);
    return rmdir(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good_targets),
        cmocka_unit_test(test_wrong_targets),
        cmocka_unit_test(test_ignored_targets),
        cmocka_unit_test(test_other_data_than_submitted),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
