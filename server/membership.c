#include "server/membership.h"

#include <assert.h>
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct membership {
    int64_t lease_ns;
    size_t count, room;
    struct member **members; /* by natural order of names */
};

static const char *const isa_texts[] = {[ISA_GENERIC] = "generic", [ISA_AVX2] = "avx2", [ISA_AVX512] = "avx512"};

const char *isa_text(enum isa isa)
{
    return isa_texts[isa];
}

const char *role_text(Tally__V1__Role role)
{
    switch (role) {
    case TALLY__V1__ROLE__WORKER:
        return "worker";
    case TALLY__V1__ROLE__SHARD:
        return "shard";
    default:
        return "node";
    }
}

int natural_compare(const char *a, const char *b)
{
    const char *x = a, *y = b;
    while (*x && *y) {
        if (isdigit((unsigned char)*x) && isdigit((unsigned char)*y)) {
            while (*x == '0')
                x++;
            while (*y == '0')
                y++;
            size_t digits_x = strspn(x, "0123456789"), digits_y = strspn(y, "0123456789");
            if (digits_x != digits_y)
                return digits_x < digits_y ? -1 : 1;
            int order = memcmp(x, y, digits_x);
            if (order != 0)
                return order;
            x += digits_x;
            y += digits_y;
        } else {
            if (*x != *y)
                return (unsigned char)*x < (unsigned char)*y ? -1 : 1;
            x++;
            y++;
        }
    }
    if (*x || *y)
        return *x ? 1 : -1;
    return strcmp(a, b); /* w1 and w01 are two names */
}

tally_status membership_open(int64_t lease_ns, struct membership **ret_m, struct tally_error *err)
{
    assert(lease_ns > 0);
    struct membership *m = calloc(1, sizeof *m);
    if (!m)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the membership");
    m->lease_ns = lease_ns;
    *ret_m = m;
    return TALLY_OK;
}

void membership_close(struct membership *m)
{
    if (!m)
        return;
    for (size_t i = 0; i < m->count; i++)
        free(m->members[i]);
    free(m->members);
    free(m);
}

/* Where name is, or would be. */
static size_t position(const struct membership *m, const char *name)
{
    size_t low = 0, high = m->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (natural_compare(m->members[middle]->name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct member *membership_find(const struct membership *m, const char *name)
{
    size_t at = position(m, name);
    return at < m->count && strcmp(m->members[at]->name, name) == 0 ? m->members[at] : NULL;
}

static bool name_is_good(const char *name)
{
    size_t length = strnlen(name, TALLY_NODE_NAME_MAX + 1);
    if (length == 0 || length > TALLY_NODE_NAME_MAX)
        return false;
    for (size_t i = 0; i < length; i++) {
        if (!isalnum((unsigned char)name[i]) && !strchr("-_.", name[i]))
            return false;
    }
    return true;
}

static tally_status check_request(const Tally__V1__Register *request, enum isa *ret_isa, struct tally_error *err)
{
    if (!name_is_good(request->name))
        return tally_fail(err, TALLY_EINVAL, "a node's name has 1 to %d letters, digits, '-', '_' and '.'",
                          TALLY_NODE_NAME_MAX);
    uint32_t major = request->version ? request->version->major : 0;
    uint32_t minor = request->version ? request->version->minor : 0;
    if (major != TALLY_PROTOCOL_MAJOR)
        return tally_fail(err, TALLY_ESTATE,
                          "%s speaks protocol version %" PRIu32 ".%" PRIu32 ", this coordinator %d.%d", request->name,
                          major, minor, TALLY_PROTOCOL_MAJOR, TALLY_PROTOCOL_MINOR);
    if (request->role != TALLY__V1__ROLE__WORKER && request->role != TALLY__V1__ROLE__SHARD)
        return tally_fail(err, TALLY_EINVAL, "%s registers with role %d, which this coordinator does not know",
                          request->name, (int)request->role);
    size_t address = strnlen(request->address, TALLY_NODE_ADDRESS_MAX + 1);
    if (address == 0 || address > TALLY_NODE_ADDRESS_MAX)
        return tally_fail(err, TALLY_EINVAL, "%s registers with an address of %zu characters, not 1 to %d",
                          request->name, address, TALLY_NODE_ADDRESS_MAX);
    if (request->role == TALLY__V1__ROLE__SHARD)
        return TALLY_OK;
    for (int i = ISA_GENERIC; i <= ISA_AVX512; i++) {
        if (strcmp(request->isa, isa_texts[i]) == 0) {
            *ret_isa = (enum isa)i;
            return TALLY_OK;
        }
    }
    return tally_fail(err, TALLY_EINVAL, "%s registers with isa \"%.32s\", which this coordinator does not know",
                      request->name, request->isa);
}

tally_status membership_add(struct membership *m, const Tally__V1__Register *request, int64_t now_ns,
                            struct member **ret_member, struct member **ret_replaced, struct tally_error *err)
{
    enum isa isa = ISA_GENERIC;
    tally_status status = check_request(request, &isa, err);
    if (status != TALLY_OK)
        return status;
    struct member *live = membership_find(m, request->name);
    if (live) {
        if (live->pid != request->pid || live->incarnation == request->incarnation ||
            strcmp(live->address, request->address) != 0)
            return tally_fail(err, TALLY_ESTATE, "there is a live node of the name %s already (process %" PRIu32 ")",
                              request->name, live->pid);
        *ret_replaced = live;
        return TALLY_OK;
    }
    if (m->count >= TALLY_NODES_MAX)
        return tally_fail(err, TALLY_ENOMEM, "%s is one node too many: this coordinator takes %d", request->name,
                          TALLY_NODES_MAX);
    if (m->count == m->room) {
        size_t room = m->room > 0 ? 2 * m->room : 16;
        struct member **members = realloc(m->members, room * sizeof(struct member *));
        if (!members)
            return tally_fail(err, TALLY_ENOMEM, "no memory for node %s", request->name);
        m->members = members;
        m->room = room;
    }
    struct member *member = calloc(1, sizeof *member);
    if (!member)
        return tally_fail(err, TALLY_ENOMEM, "no memory for node %s", request->name);
    snprintf(member->name, sizeof member->name, "%s", request->name);
    snprintf(member->address, sizeof member->address, "%s", request->address);
    member->role = request->role;
    member->incarnation = request->incarnation;
    member->pid = request->pid;
    member->isa = isa;
    member->heard_ns = now_ns;
    size_t at = position(m, member->name);
    memmove(m->members + at + 1, m->members + at, (m->count - at) * sizeof(struct member *));
    m->members[at] = member;
    m->count++;
    *ret_member = member;
    *ret_replaced = NULL;
    return TALLY_OK;
}

void membership_remove(struct membership *m, struct member *member)
{
    size_t at = position(m, member->name);
    assert(at < m->count && m->members[at] == member);
    m->count--;
    memmove(m->members + at, m->members + at + 1, (m->count - at) * sizeof(struct member *));
    free(member);
}

void membership_heard(struct membership *m, struct member *member, const char *activity, int64_t now_ns)
{
    (void)m;
    member->heard_ns = now_ns;
    if (activity)
        snprintf(member->activity, sizeof member->activity, "%s", activity);
}

struct member *membership_expired(const struct membership *m, int64_t now_ns)
{
    for (size_t i = 0; i < m->count; i++) {
        if (now_ns - m->members[i]->heard_ns >= m->lease_ns)
            return m->members[i];
    }
    return NULL;
}

int64_t membership_lease_ns(const struct membership *m)
{
    return m->lease_ns;
}

size_t membership_count(const struct membership *m)
{
    return m->count;
}

struct member *membership_at(const struct membership *m, size_t i)
{
    assert(i < m->count);
    return m->members[i];
}

size_t membership_idle(const struct membership *m, Tally__V1__Role role, struct member **members, size_t max)
{
    size_t count = 0;
    for (size_t i = 0; i < m->count && count < max; i++) {
        if (m->members[i]->role == role && m->members[i]->job == 0)
            members[count++] = m->members[i];
    }
    return count;
}

size_t membership_role_count(const struct membership *m, Tally__V1__Role role)
{
    size_t count = 0;
    for (size_t i = 0; i < m->count; i++)
        count += m->members[i]->role == role;
    return count;
}
