#include "server/gang.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void add(struct membership *m, const char *name, const char *isa)
{
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    version.major = TALLY_PROTOCOL_MAJOR;
    Tally__V1__Register request = TALLY__V1__REGISTER__INIT;
    request.version = &version;
    request.role = isa ? TALLY__V1__ROLE__WORKER : TALLY__V1__ROLE__SHARD;
    request.name = (char *)(uintptr_t)name;
    request.address = "unix:/n";
    request.isa = (char *)(uintptr_t)(isa ? isa : "");
    struct member *member, *replaced;
    assert_int_equal(membership_add(m, &request, 0, &member, &replaced, NULL), TALLY_OK);
}

static struct membership *cluster(void)
{
    struct membership *m = NULL;
    assert_int_equal(membership_open(1, &m, NULL), TALLY_OK);
    add(m, "w10", "avx2");
    add(m, "w2", "avx512");
    add(m, "w1", "avx512");
    add(m, "s1", NULL);
    add(m, "s0", NULL);
    return m;
}

static void expect_wait(const struct membership *m, struct gang_size size, const char *text)
{
    struct gang gang;
    struct tally_error err;
    assert_int_equal(gang_form(m, &size, &gang, &err), TALLY_EUNAVAIL);
    assert_string_equal(err.message, text);
}

static void ranks_follow_names(void **state)
{
    (void)state;
    struct membership *m = cluster();
    struct gang gang;
    assert_int_equal(gang_form(m, &(struct gang_size){2, 2, 1, 1, 1}, &gang, NULL), TALLY_OK);
    assert_int_equal(gang.worker_count, 2);
    assert_string_equal(gang.workers[0]->name, "w1");
    assert_string_equal(gang.workers[1]->name, "w2");
    assert_int_equal(gang.shard_count, 1);
    assert_string_equal(gang.shards[0]->name, "s0");
    assert_int_equal(gang.isa, ISA_AVX512);
    gang_clear(&gang);
    assert_int_equal(gang_form(m, &(struct gang_size){3, 3, 1, 1, 2}, &gang, NULL), TALLY_OK);
    assert_string_equal(gang.workers[2]->name, "w10");
    assert_int_equal(gang.isa, ISA_AVX2); /* the lowest */
    gang_clear(&gang);
    membership_close(m);
}

static void what_is_missing_is_said(void **state)
{
    (void)state;
    struct membership *m = cluster();
    expect_wait(m, (struct gang_size){4, 4, 1, 1, 1}, "waits for 4 workers: 3 of 4 here");
    expect_wait(m, (struct gang_size){2, 2, 2, 2, 3},
                "waits for 8 workers: 3 of 8 here; and for 3 shards: 2 of 3 here");
    membership_find(m, "w1")->job = 3;
    membership_find(m, "s1")->job = 3;
    expect_wait(m, (struct gang_size){3, 3, 1, 1, 1}, "waits for 3 workers: 2 of 3 here and idle, 1 busy");
    expect_wait(m, (struct gang_size){1, 1, 1, 1, 2}, "waits for 2 shards: 1 of 2 here and idle, 1 busy");
    membership_close(m);
    assert_int_equal(membership_open(1, &m, NULL), TALLY_OK);
    expect_wait(m, (struct gang_size){1, 1, 1, 1, 1}, "waits for 1 worker: 0 of 1 here; and for 1 shard: 0 of 1 here");
    membership_close(m);
}

/* As many replicas as whole ones are there, between the two. */
static void an_elastic_job_takes_what_is_there(void **state)
{
    (void)state;
    struct membership *m = cluster();
    struct gang gang;
    assert_int_equal(gang_form(m, &(struct gang_size){1, 8, 1, 1, 1}, &gang, NULL), TALLY_OK);
    assert_int_equal(gang.data, 3);
    gang_clear(&gang);
    assert_int_equal(gang_form(m, &(struct gang_size){1, 2, 1, 1, 1}, &gang, NULL), TALLY_OK);
    assert_int_equal(gang.data, 2);
    gang_clear(&gang);
    assert_int_equal(gang_form(m, &(struct gang_size){1, 8, 2, 1, 1}, &gang, NULL), TALLY_OK);
    assert_int_equal(gang.data, 1);
    assert_int_equal(gang.worker_count, 2);
    gang_clear(&gang);
    expect_wait(m, (struct gang_size){4, 8, 1, 1, 1}, "waits for 4 workers: 3 of 4 here");
    membership_close(m);
}

static void sizes_come_from_the_spec(void **state)
{
    (void)state;
    Tally__V1__JobSpec spec = TALLY__V1__JOB_SPEC__INIT;
    Tally__V1__Parallel parallel = TALLY__V1__PARALLEL__INIT;
    Tally__V1__Replicas data = TALLY__V1__REPLICAS__INIT;
    Tally__V1__Pipeline pipeline = TALLY__V1__PIPELINE__INIT;
    Tally__V1__Tensor tensor = TALLY__V1__TENSOR__INIT;
    struct gang_size size;
    struct tally_error err;
    assert_int_equal(gang_size_of(&spec, &size, &err), TALLY_OK);
    assert_memory_equal(&size, (&(struct gang_size){1, 1, 1, 1, 1}), sizeof size);
    spec.parallel = &parallel;
    parallel.data = &data;
    data.has_count = true;
    data.count = 4;
    parallel.shards = 3;
    parallel.pipeline = &pipeline;
    pipeline.stages = 2;
    parallel.tensor = &tensor;
    tensor.size = 5;
    assert_int_equal(gang_size_of(&spec, &size, &err), TALLY_OK);
    assert_memory_equal(&size, (&(struct gang_size){4, 4, 2, 5, 3}), sizeof size);
    data.has_count = false;
    data.has_max = true;
    data.max = 6;
    assert_int_equal(gang_size_of(&spec, &size, &err), TALLY_OK);
    assert_memory_equal(&size, (&(struct gang_size){1, 6, 2, 5, 3}), sizeof size);
    data.has_min = true;
    data.min = 7;
    assert_int_equal(gang_size_of(&spec, &size, &err), TALLY_EINVAL);
    data.max = 1024;
    data.min = 1000;
    assert_int_equal(gang_size_of(&spec, &size, &err), TALLY_EINVAL);
    assert_non_null(strstr(err.message, "1000 x 2 x 5 workers"));
    pipeline.stages = UINT32_MAX;
    tensor.size = UINT32_MAX;
    assert_int_equal(gang_size_of(&spec, &size, &err), TALLY_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_follow_names),
        cmocka_unit_test(what_is_missing_is_said),
        cmocka_unit_test(an_elastic_job_takes_what_is_there),
        cmocka_unit_test(sizes_come_from_the_spec),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
