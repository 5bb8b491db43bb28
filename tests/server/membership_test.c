#include "server/membership.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define LEASE 1000

static Tally__V1__Register request_of(Tally__V1__Role role, const char *name, uint64_t incarnation,
                                      Tally__V1__Version *version)
{
    tally__v1__version__init(version);
    version->major = TALLY_PROTOCOL_MAJOR;
    version->minor = TALLY_PROTOCOL_MINOR + 7; /* a newer minor is welcome */
    Tally__V1__Register request = TALLY__V1__REGISTER__INIT;
    request.version = version;
    request.role = role;
    request.name = (char *)(uintptr_t)name;
    request.incarnation = incarnation;
    request.address = "unix:/run/node.sock";
    request.pid = 7;
    request.isa = "avx2";
    return request;
}

static struct member *add(struct membership *m, Tally__V1__Role role, const char *name, int64_t now)
{
    Tally__V1__Version version;
    Tally__V1__Register request = request_of(role, name, 1, &version);
    struct member *member = NULL, *replaced = NULL;
    struct tally_error err;
    if (membership_add(m, &request, now, &member, &replaced, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    assert_null(replaced);
    return member;
}

static void names_are_ordered_as_people_do(void **state)
{
    (void)state;
    const char *const names[] = {"",
                                 "-",
                                 "0",
                                 "2",
                                 "10",
                                 "a",
                                 "a1b2",
                                 "a1b10",
                                 "a1b10c",
                                 "a2",
                                 "w0",
                                 "w00",
                                 "w1",
                                 "w01",
                                 "w2",
                                 "w10",
                                 "w10a",
                                 "w10b",
                                 "w99999999999999999999",
                                 "w100000000000000000000",
                                 "x"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        for (size_t j = 0; j < sizeof names / sizeof names[0]; j++) {
            int got = natural_compare(names[i], names[j]), want = i < j ? -1 : i > j;
            /* w0 and w00, w1 and w01 are different names of one number: any order, but a fixed one. */
            if ((got > 0) - (got < 0) != want && atoll(names[i] + 1) != atoll(names[j] + 1))
                fail_msg("\"%s\" and \"%s\": %d", names[i], names[j], got);
            assert_int_equal(got == 0, i == j);
            int back = natural_compare(names[j], names[i]);
            assert_int_equal((got > 0) - (got < 0), (back < 0) - (back > 0));
        }
    }
}

static void nodes_are_found_in_order(void **state)
{
    (void)state;
    struct membership *m = NULL;
    assert_int_equal(membership_open(LEASE, &m, NULL), TALLY_OK);
    const char *const names[] = {"w10", "w2", "s1", "w0", "s0", "w1", "w11"};
    for (size_t i = 0; i < 7; i++)
        add(m, names[i][0] == 'w' ? TALLY__V1__ROLE__WORKER : TALLY__V1__ROLE__SHARD, names[i], 0);
    const char *const ordered[] = {"s0", "s1", "w0", "w1", "w2", "w10", "w11"};
    assert_int_equal(membership_count(m), 7);
    for (size_t i = 0; i < 7; i++) {
        assert_string_equal(membership_at(m, i)->name, ordered[i]);
        assert_ptr_equal(membership_find(m, ordered[i]), membership_at(m, i));
    }
    assert_null(membership_find(m, "w3"));
    membership_find(m, "w1")->job = 4;
    struct member *idle[4];
    assert_int_equal(membership_idle(m, TALLY__V1__ROLE__WORKER, idle, 3), 3);
    assert_string_equal(idle[0]->name, "w0");
    assert_string_equal(idle[1]->name, "w2");
    assert_string_equal(idle[2]->name, "w10");
    assert_int_equal(membership_idle(m, TALLY__V1__ROLE__SHARD, idle, 4), 2);
    assert_int_equal(membership_role_count(m, TALLY__V1__ROLE__WORKER), 5);
    membership_remove(m, membership_find(m, "w2"));
    assert_null(membership_find(m, "w2"));
    assert_string_equal(membership_at(m, 4)->name, "w10");
    membership_close(m);
}

static void a_lease_runs_out_when_nothing_is_heard(void **state)
{
    (void)state;
    struct membership *m = NULL;
    assert_int_equal(membership_open(LEASE, &m, NULL), TALLY_OK);
    int64_t start = INT64_C(1) << 62; /* a clock may begin anywhere */
    struct member *w0 = add(m, TALLY__V1__ROLE__WORKER, "w0", start);
    struct member *w1 = add(m, TALLY__V1__ROLE__WORKER, "w1", start + 300);
    assert_null(membership_expired(m, start));
    assert_null(membership_expired(m, start + LEASE - 1));
    assert_ptr_equal(membership_expired(m, start + LEASE), w0);
    membership_heard(m, w0, "step 4", start + 900);
    assert_string_equal(w0->activity, "step 4");
    assert_null(membership_expired(m, start + 300 + LEASE - 1));
    assert_ptr_equal(membership_expired(m, start + 300 + LEASE), w1);
    membership_heard(m, w0, NULL, start + 1000);
    assert_string_equal(w0->activity, "step 4");
    membership_remove(m, w1);
    assert_null(membership_expired(m, start + 1000 + LEASE - 1));
    assert_ptr_equal(membership_expired(m, start + 1000 + LEASE), w0);
    membership_close(m);
}

static void an_activity_is_cut(void **state)
{
    (void)state;
    struct membership *m = NULL;
    assert_int_equal(membership_open(LEASE, &m, NULL), TALLY_OK);
    char text[2000];
    memset(text, 'a', sizeof text);
    text[sizeof text - 1] = '\0';
    struct member *w0 = add(m, TALLY__V1__ROLE__WORKER, "w0", 0);
    membership_heard(m, w0, text, 1);
    assert_int_equal(strlen(w0->activity), TALLY_ACTIVITY_MAX);
    membership_close(m);
}

static void expect_refusal(struct membership *m, const Tally__V1__Register *request, tally_status code,
                           const char *text)
{
    struct member *member = NULL, *replaced = NULL;
    struct tally_error err;
    assert_int_equal(membership_add(m, request, 0, &member, &replaced, &err), code);
    assert_null(member);
    if (!strstr(err.message, text))
        fail_msg("\"%s\" is not in: %s", text, err.message);
}

static void bad_registrations_are_refused(void **state)
{
    (void)state;
    struct membership *m = NULL;
    assert_int_equal(membership_open(LEASE, &m, NULL), TALLY_OK);
    add(m, TALLY__V1__ROLE__WORKER, "w0", 0);
    Tally__V1__Version version;
    Tally__V1__Register request = request_of(TALLY__V1__ROLE__WORKER, "w0", 2, &version);
    request.pid = 8;
    expect_refusal(m, &request, TALLY_ESTATE, "live node of the name w0 already (process 7)");
    request = request_of(TALLY__V1__ROLE__WORKER, "w0", 1, &version);
    expect_refusal(m, &request, TALLY_ESTATE, "live node");
    request = request_of(TALLY__V1__ROLE__WORKER, "w1", 1, &version);
    version.major = 9;
    expect_refusal(m, &request, TALLY_ESTATE, "w1 speaks protocol version 9.7, this coordinator 1.0");
    request.version = NULL;
    expect_refusal(m, &request, TALLY_ESTATE, "protocol version 0.0");
    char name[100];
    memset(name, 'n', sizeof name);
    name[TALLY_NODE_NAME_MAX + 1] = '\0';
    const char *const bad[] = {"", "a b", "a/b", "\xc3\xa4", name};
    for (size_t i = 0; i < 5; i++) {
        request = request_of(TALLY__V1__ROLE__WORKER, bad[i], 1, &version);
        expect_refusal(m, &request, TALLY_EINVAL, "a node's name has");
    }
    request = request_of(TALLY__V1__ROLE__ROLE_UNKNOWN, "w1", 1, &version);
    expect_refusal(m, &request, TALLY_EINVAL, "role 0");
    request = request_of(TALLY__V1__ROLE__WORKER, "w1", 1, &version);
    request.isa = "mmx";
    expect_refusal(m, &request, TALLY_EINVAL, "isa \"mmx\"");
    request = request_of(TALLY__V1__ROLE__WORKER, "w1", 1, &version);
    request.address = "";
    expect_refusal(m, &request, TALLY_EINVAL, "address of 0 characters");
    membership_close(m);
}

/* The same process, registering again before its old stream was seen to end, takes its own name over. */
static void a_process_replaces_itself(void **state)
{
    (void)state;
    struct membership *m = NULL;
    assert_int_equal(membership_open(LEASE, &m, NULL), TALLY_OK);
    struct member *old = add(m, TALLY__V1__ROLE__SHARD, "s0", 0), *member = NULL, *replaced = NULL;
    Tally__V1__Version version;
    Tally__V1__Register request = request_of(TALLY__V1__ROLE__SHARD, "s0", 2, &version);
    assert_int_equal(membership_add(m, &request, 5, &member, &replaced, NULL), TALLY_OK);
    assert_ptr_equal(replaced, old);
    assert_null(member);
    membership_remove(m, old);
    assert_int_equal(membership_add(m, &request, 5, &member, &replaced, NULL), TALLY_OK);
    assert_null(replaced);
    assert_int_equal(member->incarnation, 2);
    membership_close(m);
}

static void there_is_a_bound(void **state)
{
    (void)state;
    struct membership *m = NULL;
    assert_int_equal(membership_open(LEASE, &m, NULL), TALLY_OK);
    char name[32];
    for (int i = 0; i < TALLY_NODES_MAX; i++) {
        snprintf(name, sizeof name, "w%u", (unsigned)i * 2654435761u % TALLY_NODES_MAX);
        add(m, TALLY__V1__ROLE__WORKER, name, 0);
    }
    Tally__V1__Version version;
    Tally__V1__Register request = request_of(TALLY__V1__ROLE__WORKER, "one-more", 1, &version);
    expect_refusal(m, &request, TALLY_ENOMEM, "one node too many");
    membership_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_ordered_as_people_do),
        cmocka_unit_test(nodes_are_found_in_order),
        cmocka_unit_test(a_lease_runs_out_when_nothing_is_heard),
        cmocka_unit_test(an_activity_is_cut),
        cmocka_unit_test(bad_registrations_are_refused),
        cmocka_unit_test(a_process_replaces_itself),
        cmocka_unit_test(there_is_a_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
