#ifndef SERVER_MEMBERSHIP_H
#define SERVER_MEMBERSHIP_H
/*
 * The nodes of a cluster and their leases. Pure: time is given by the caller (tally_now_ns's clock), streams are the
 * caller's. A node is here while it is live; one that is lost is removed, and comes back as a new incarnation.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"
#include "common/limits.h"
#include "proto/cluster.pb-c.h"

/* From worst to best; a gang runs the worst of its workers'. */
enum isa { ISA_GENERIC, ISA_AVX2, ISA_AVX512 };

struct member {
    char name[TALLY_NODE_NAME_MAX + 1];
    char address[TALLY_NODE_ADDRESS_MAX + 1];
    char activity[TALLY_ACTIVITY_MAX + 1]; /* of its last heartbeat since it took up its job; may be empty */
    Tally__V1__Role role;
    uint64_t incarnation;
    uint32_t pid;
    enum isa isa; /* workers */
    int64_t heard_ns;
    uint64_t job; /* that it works for, or was told to drop and has not dropped yet; 0: it is idle */
    void *user;   /* the caller's */
};

struct membership;

tally_status membership_open(int64_t lease_ns, struct membership **ret_m, struct tally_error *err);
/* Accepts NULL. */
void membership_close(struct membership *m);

/*
 * Takes a node up; its lease begins now. *ret_replaced: NULL, or the live node of the same name that this one takes
 * over from because it is the same process, registering again before its loss was seen: the caller treats that one as
 * lost (membership_remove) and calls again. TALLY_ESTATE: another protocol version (both are named), or the name is
 * that of a live node; TALLY_EINVAL: what is wrong with the request; TALLY_ENOMEM: too many nodes.
 */
tally_status membership_add(struct membership *m, const Tally__V1__Register *request, int64_t now_ns,
                            struct member **ret_member, struct member **ret_replaced, struct tally_error *err);
/* Frees member. */
void membership_remove(struct membership *m, struct member *member);

/* Something was heard from it. activity may be NULL: unchanged. */
void membership_heard(struct membership *m, struct member *member, const char *activity, int64_t now_ns);

/* A node whose lease has run out; NULL: none. */
struct member *membership_expired(const struct membership *m, int64_t now_ns);
int64_t membership_lease_ns(const struct membership *m);

size_t membership_count(const struct membership *m);
/* In the natural order of names, workers and shards mixed. i < count; good until a node is added or removed. */
struct member *membership_at(const struct membership *m, size_t i);
/* NULL: no live node of this name. */
struct member *membership_find(const struct membership *m, const char *name);

/* The first idle nodes of a role in the natural order of names: at most max of them go into members. Returns how many.
 */
size_t membership_idle(const struct membership *m, Tally__V1__Role role, struct member **members, size_t max);
/* Live nodes of a role, idle or not. */
size_t membership_role_count(const struct membership *m, Tally__V1__Role role);

/* Order of names in which w2 comes before w10: runs of digits compare as numbers. As strcmp. */
int natural_compare(const char *a, const char *b);

/* "avx2" for ISA_AVX2. A static string. */
const char *isa_text(enum isa isa);
/* "worker", "shard". A static string. */
const char *role_text(Tally__V1__Role role);
#endif
