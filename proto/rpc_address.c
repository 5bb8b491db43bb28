/*
 * Addresses: "unix:/path" and "host:port". gRPC says only that a port could not be added, so a server first tries
 * bind() itself, for the reason; and gRPC removes any socket file that is in its way, so it is asked only after
 * connect() has shown that nobody listens there.
 */
#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/limits.h"
#include "proto/rpc_internal.h"

static_assert(sizeof((struct rpc_address *)0)->path == TALLY_UNIX_PATH_MAX, "a path is a sun_path");
static_assert(sizeof((struct sockaddr_un *)0)->sun_path == TALLY_UNIX_PATH_MAX, "a path is a sun_path");

static tally_status parse_unix(const char *path, struct rpc_address *ret_address, struct tally_error *err)
{
    size_t n = strlen(path);
    if (n == 0)
        return tally_fail(err, TALLY_EINVAL, "the address unix: has no path");
    if (n >= TALLY_UNIX_PATH_MAX)
        return tally_fail(err, TALLY_EINVAL,
                          "the path of a UNIX socket may have at most %d bytes, this has %zu: %.200s",
                          TALLY_UNIX_PATH_MAX - 1, n, path);
    *ret_address = (struct rpc_address){.is_unix = true};
    memcpy(ret_address->path, path, n + 1);
    return TALLY_OK;
}

static bool parse_port(const char *text, unsigned *ret_port)
{
    unsigned port = 0;
    size_t n = strlen(text);
    if (n == 0 || n > 5)
        return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9')
            return false;
        port = port * 10 + (unsigned)(*text - '0');
    }
    if (port > 65535)
        return false;
    *ret_port = port;
    return true;
}

tally_status rpc_address_parse(const char *text, struct rpc_address *ret_address, struct tally_error *err)
{
    if (strncmp(text, "unix:", 5) == 0)
        return parse_unix(text + 5, ret_address, err);
    struct rpc_address address = {0};
    const char *colon = strrchr(text, ':');
    const char *host = text;
    size_t n = colon ? (size_t)(colon - text) : 0;
    if (n >= 2 && host[0] == '[' && host[n - 1] == ']') { /* [::1]:5000 */
        host++;
        n -= 2;
    } else if (memchr(host, ':', n)) {
        n = 0; /* IPv6 without brackets is ambiguous */
    }
    if (n == 0 || n >= sizeof address.host || !parse_port(colon + 1, &address.port))
        return tally_fail(err, TALLY_EINVAL, "%.200s is no address: it must be unix:/path, host:port or [ipv6]:port",
                          text);
    memcpy(address.host, host, n);
    *ret_address = address;
    return TALLY_OK;
}

/* gRPC takes targets as URIs. */
static void append_escaped(char *out, size_t out_bytes, const char *text)
{
    size_t n = strlen(out);
    for (; *text && n + 4 < out_bytes; text++) {
        bool plain = (*text >= 'a' && *text <= 'z') || (*text >= 'A' && *text <= 'Z') ||
                     (*text >= '0' && *text <= '9') || strchr("-._~/", *text);
        n += (size_t)snprintf(out + n, out_bytes - n, plain ? "%c" : "%%%02X", (unsigned char)*text);
    }
}

void rpc_address_target(const struct rpc_address *address, char target[RPC_TARGET_MAX])
{
    if (address->is_unix) {
        snprintf(target, RPC_TARGET_MAX, "unix:");
        append_escaped(target, RPC_TARGET_MAX, address->path);
        return;
    }
    struct in6_addr ipv6;
    struct in_addr ipv4;
    if (inet_pton(AF_INET, address->host, &ipv4) == 1)
        snprintf(target, RPC_TARGET_MAX, "ipv4:%s:%u", address->host, address->port);
    else if (inet_pton(AF_INET6, address->host, &ipv6) == 1)
        snprintf(target, RPC_TARGET_MAX, "ipv6:%%5B%s%%5D:%u", address->host, address->port);
    else
        snprintf(target, RPC_TARGET_MAX, "dns:///%s:%u", address->host, address->port);
}

/* ---- may a server listen there? ---- */

static tally_status fail_bind(struct tally_error *err, const char *where, unsigned port)
{
    int saved = errno;
    char text[320];
    if (port)
        snprintf(text, sizeof text, "%.200s:%u", where, port);
    else
        snprintf(text, sizeof text, "%.200s", where);
    errno = saved;
    if (errno == EADDRINUSE)
        return tally_fail(err, TALLY_EEXIST, "cannot listen on %s: somebody listens there already", text);
    if (errno == EACCES || errno == EPERM) {
        tally_fail_errno(err, "cannot listen on %s", text);
        if (err)
            err->code = TALLY_EDENIED;
        return TALLY_EDENIED;
    }
    return tally_fail_errno(err, "cannot listen on %s", text);
}

static tally_status probe_unix(const struct rpc_address *address, struct tally_error *err)
{
    struct sockaddr_un sun = {.sun_family = AF_UNIX};
    memcpy(sun.sun_path, address->path, sizeof sun.sun_path);
    tally_status status = TALLY_OK;
    struct stat st;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return tally_fail_errno(err, "cannot make a socket");
    if (lstat(address->path, &st) == 0) {
        if (!S_ISSOCK(st.st_mode)) {
            status = tally_fail(err, TALLY_EEXIST, "cannot listen on unix:%s: a file that is no socket stands there",
                                address->path);
            goto out;
        }
        /* A full backlog (EAGAIN) is somebody, too; only a refusal says that the socket was left behind. */
        if (connect(fd, (struct sockaddr *)&sun, sizeof sun) == 0 || errno != ECONNREFUSED) {
            errno = errno == EACCES ? EACCES : EADDRINUSE;
            status = fail_bind(err, address->path, 0);
            goto out;
        }
        if (unlink(address->path) != 0 && errno != ENOENT) {
            status = tally_fail_errno(err, "cannot replace the socket %s, which nobody listens on", address->path);
            goto out;
        }
    }
    if (bind(fd, (struct sockaddr *)&sun, sizeof sun) != 0)
        status = fail_bind(err, address->path, 0);
    else
        unlink(address->path);
out:
    close(fd);
    return status;
}

static bool is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr) >> 24 == 127;
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

static tally_status probe_bind(const struct addrinfo *info, const struct rpc_address *address, struct tally_error *err)
{
    int on = 1;
    tally_status status = TALLY_OK;
    int fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return tally_fail_errno(err, "cannot make a socket");
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on); /* as gRPC does: a port in TIME_WAIT is free */
    if (bind(fd, info->ai_addr, info->ai_addrlen) != 0 || listen(fd, 1) != 0)
        status = fail_bind(err, address->host, address->port);
    close(fd);
    return status;
}

static tally_status probe_tcp(const struct rpc_address *address, bool allow_network, char ret_target[RPC_TARGET_MAX],
                              struct tally_error *err)
{
    char port[8], host[INET6_ADDRSTRLEN + 16];
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *all = NULL;
    snprintf(port, sizeof port, "%u", address->port);
    int e = getaddrinfo(address->host, port, &hints, &all);
    if (e != 0)
        return tally_fail(err, TALLY_EINVAL, "cannot listen on %s:%u: %s", address->host, address->port,
                          gai_strerror(e));
    const struct addrinfo *info = all; /* IPv4 where a name has both: localhost is 127.0.0.1 to most tools */
    for (const struct addrinfo *i = all; i; i = i->ai_next) {
        if (i->ai_family == AF_INET) {
            info = i;
            break;
        }
    }
    tally_status status;
    if (!allow_network && !is_loopback(info->ai_addr))
        status = tally_fail(err, TALLY_EDENIED,
                            "cannot listen on %s:%u: without TLS only loopback and UNIX addresses are served",
                            address->host, address->port);
    else
        status = probe_bind(info, address, err);
    if (!status && getnameinfo(info->ai_addr, info->ai_addrlen, host, sizeof host, NULL, 0, NI_NUMERICHOST) != 0)
        status =
            tally_fail(err, TALLY_EINVAL, "cannot listen on %s:%u: no numeric address", address->host, address->port);
    if (!status)
        snprintf(ret_target, RPC_TARGET_MAX, info->ai_family == AF_INET6 ? "[%s]:%u" : "%s:%u", host, address->port);
    freeaddrinfo(all);
    return status;
}

tally_status rpc_address_probe(const struct rpc_address *address, bool allow_network, char ret_target[RPC_TARGET_MAX],
                               struct tally_error *err)
{
    if (!address->is_unix)
        return probe_tcp(address, allow_network, ret_target, err);
    tally_status status = probe_unix(address, err);
    if (!status)
        rpc_address_target(address, ret_target);
    return status;
}
