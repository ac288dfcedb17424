/* Receiving on many sockets in one call: the harvest of `receive.HarvestSelector` without Python.

Each read is kept with its times in its stream's buffer. The caller is told of a stream only when
the end of a response may be among what came, when it closed or failed, or when it can write again;
and of every descriptor of the same epoll that is no stream. All times are CLOCK_MONOTONIC ns but
the kernel's, which are its own (CLOCK_REALTIME). Nothing here blocks but `harvester_wait`, and one
thread uses a harvester.

TLS is decrypted by the library that Python's `ssl` has loaded (see `native_tls.py`): Python makes the
handshake and sends, and the session is read here. Nothing of OpenSSL is needed to compile this. */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SCM_TIMESTAMPNS
#define SCM_TIMESTAMPNS SO_TIMESTAMPNS
#endif

enum { READ_BYTES = 65536, MOST_READS = 8192, KEPT_BYTES = 262144, KEPT_ROWS = 8192 };
enum { MOST_PLAIN_BYTES = 16384, WANT_READ = 2, ZERO_RETURN = 6 }; /* of a TLS record; SSL_ERROR_... */
enum wake_kind {
    NO_STREAM = 0, MAY_HAVE_ENDED = 1, CLOSED = 2, FAILED = 3, WRITABLE = 4, TLS_FAILED = 5
};

struct row { /* one read: `end` is the response's bytes up to and with it */
    int64_t user_ns, bound_ns, end;
    int64_t kernel_s, kernel_ns; /* -1: no stamp */
};

struct stream {
    uint8_t *data;
    int64_t num_bytes;
    struct row *rows;
    int64_t num_rows;
    int64_t limit_bytes; /* the caller is told of each read beyond it */
    int64_t chunked;     /* the body is: reads that end a chunk of events are no end */
    int64_t capacity_bytes, capacity_rows;
    void *session, *incoming; /* SSL and the memory BIO that it reads; NULL without TLS */
};

struct tls_calls { /* the same order as in `native_tls.py` */
    int (*read)(void *session, void *plain, int num_bytes);   /* SSL_read */
    int (*error)(const void *session, int result);            /* SSL_get_error */
    int (*feed)(void *incoming, const void *data, int num_bytes); /* BIO_write */
    unsigned long (*reason)(void);                            /* ERR_peek_last_error */
    void (*clear)(void);                                      /* ERR_clear_error */
};

struct wake {
    int32_t fd, kind;
    uint32_t events;
    int32_t error; /* errno of FAILED, OpenSSL's code of TLS_FAILED */
};

struct harvester {
    int epoll_fd;
    int64_t harvested_ns; /* nothing that is not read yet was ready then */
    struct stream **streams;
    int num_slots;
    struct epoll_event *events;
    int num_events;
    int no_pwait2; /* the kernel is older than epoll_pwait2 (5.11) */
    struct tls_calls tls;
    uint8_t scratch[READ_BYTES];
};

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

struct harvester *harvester_new(int epoll_fd) {
    struct harvester *self = calloc(1, sizeof *self);
    if (self != NULL) {
        self->epoll_fd = epoll_fd;
        self->harvested_ns = monotonic_ns();
    }
    return self;
}

static void free_stream(struct stream *stream) {
    if (stream != NULL) {
        free(stream->data);
        free(stream->rows);
        free(stream);
    }
}

void harvester_free(struct harvester *self) {
    for (int fd = 0; fd < self->num_slots; fd++) free_stream(self->streams[fd]);
    free(self->streams);
    free(self->events);
    free(self);
}

/* A buffer for this descriptor; NULL without memory. The caller adds it to the epoll, edge-triggered
   and with EPOLLRDHUP: told again of every arrival, the kernel need not look whether more is there. */
struct stream *harvester_add(struct harvester *self, int fd) {
    if (fd < 0) return NULL;
    if (fd >= self->num_slots) {
        int num_slots = fd + 256;
        struct stream **grown = realloc(self->streams, (size_t)num_slots * sizeof *grown);
        if (grown == NULL) return NULL;
        memset(grown + self->num_slots, 0, (size_t)(num_slots - self->num_slots) * sizeof *grown);
        self->streams = grown;
        self->num_slots = num_slots;
    }
    free_stream(self->streams[fd]);
    return self->streams[fd] = calloc(1, sizeof(struct stream));
}

/* Decrypt what this stream reads from now on; `calls` are those of the session's library. */
void harvester_decrypt(
    struct harvester *self, struct stream *stream, const struct tls_calls *calls, void *session,
    void *incoming
) {
    self->tls = *calls;
    stream->session = session;
    stream->incoming = incoming;
}

void harvester_remove(struct harvester *self, int fd) {
    if (fd >= 0 && fd < self->num_slots) {
        free_stream(self->streams[fd]);
        self->streams[fd] = NULL;
    }
}

/* Forget what came; memory of an unusually large response is given back. */
void stream_restart(struct stream *stream, int64_t limit_bytes) {
    if (stream->capacity_bytes > KEPT_BYTES) {
        free(stream->data);
        stream->data = NULL;
        stream->capacity_bytes = 0;
    }
    if (stream->capacity_rows > KEPT_ROWS) {
        free(stream->rows);
        stream->rows = NULL;
        stream->capacity_rows = 0;
    }
    stream->num_bytes = stream->num_rows = stream->chunked = 0;
    stream->limit_bytes = limit_bytes;
}

static int has_room(struct stream *stream, int64_t num_bytes) {
    int64_t needed = stream->num_bytes + num_bytes;
    if (needed > stream->capacity_bytes) {
        int64_t capacity = stream->capacity_bytes ? stream->capacity_bytes : 8192;
        while (capacity < needed) capacity *= 2;
        uint8_t *grown = realloc(stream->data, (size_t)capacity);
        if (grown == NULL) return 0;
        stream->data = grown;
        stream->capacity_bytes = capacity;
    }
    if (stream->num_rows == stream->capacity_rows) {
        int64_t capacity = stream->capacity_rows ? 2 * stream->capacity_rows : 128;
        struct row *grown = realloc(stream->rows, (size_t)capacity * sizeof *grown);
        if (grown == NULL) return 0;
        stream->rows = grown;
        stream->capacity_rows = capacity;
    }
    return 1;
}

static void take_stamp(struct msghdr *message, struct row *row) {
    row->kernel_s = row->kernel_ns = -1;
    struct cmsghdr *control = CMSG_FIRSTHDR(message);
    if (control != NULL && control->cmsg_level == SOL_SOCKET &&
        control->cmsg_type == SCM_TIMESTAMPNS &&
        control->cmsg_len >= CMSG_LEN(sizeof(struct timespec))) {
        struct timespec stamp;
        memcpy(&stamp, CMSG_DATA(control), sizeof stamp);
        row->kernel_s = stamp.tv_sec;
        row->kernel_ns = stamp.tv_nsec;
    }
}

/* Whether these are the last bytes of a chunk of events: a response ends with an empty line. */
static int more_follows(const uint8_t *data, int64_t num_bytes) {
    if (num_bytes < 4) return 0;
    const uint8_t *tail = data + num_bytes - 4;
    return memcmp(tail, "\n\n\r\n", 4) == 0 || memcmp(tail, "}\n\r\n", 4) == 0;
}

/* Add the plain bytes of a read to the stream; 0 if that went well, or why not. */
static enum wake_kind decrypt(
    struct harvester *self, struct stream *stream, int num_bytes, int32_t *error
) {
    self->tls.clear(); /* an older error would pass for this session's */
    *error = ENOMEM;
    if (self->tls.feed(stream->incoming, self->scratch, num_bytes) != num_bytes) return FAILED;
    for (;;) {
        if (!has_room(stream, MOST_PLAIN_BYTES)) return FAILED;
        uint8_t *plain = stream->data + stream->num_bytes;
        int got = self->tls.read(stream->session, plain, MOST_PLAIN_BYTES);
        if (got > 0) {
            stream->num_bytes += got;
            continue;
        }
        int why = self->tls.error(stream->session, got);
        if (why == WANT_READ) return 0;
        if (why == ZERO_RETURN) return CLOSED;
        *error = (int32_t)self->tls.reason();
        return TLS_FAILED;
    }
}

/* Read once, `came` bytes or none; 0 if nobody need be told. */
static enum wake_kind read_once(
    struct harvester *self, struct stream *stream, int fd, int64_t bound_ns, int32_t *error,
    ssize_t *came
) {
    union {
        char bytes[64];
        struct cmsghdr aligned;
    } control;
    struct iovec place = {self->scratch, READ_BYTES};
    struct msghdr message = {
        .msg_iov = &place, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control
    };
    ssize_t num_bytes = recvmsg(fd, &message, MSG_DONTWAIT);
    *came = num_bytes > 0 ? num_bytes : 0;
    if (num_bytes < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) return 0; /* it never blocks: no EINTR */
        *error = errno;
        return FAILED;
    }
    if (num_bytes == 0) return CLOSED;
    int64_t before = stream->num_bytes;
    enum wake_kind ended = 0;
    if (stream->session != NULL) {
        ended = decrypt(self, stream, (int)num_bytes, error);
        if (stream->num_bytes == before) return ended; /* a part of a record, or a ticket */
    } else if (has_room(stream, num_bytes)) {
        memcpy(stream->data + before, self->scratch, (size_t)num_bytes);
        stream->num_bytes += num_bytes;
    } else {
        *error = ENOMEM;
        return FAILED;
    }
    int quiet = stream->chunked && before < stream->limit_bytes &&
                more_follows(stream->data + before, stream->num_bytes - before);
    struct row *row = &stream->rows[stream->num_rows++];
    row->user_ns = monotonic_ns();
    row->bound_ns = bound_ns;
    row->end = stream->num_bytes;
    take_stamp(&message, row);
    return ended ? ended : quiet ? 0 : MAY_HAVE_ENDED;
}

static int wait_for_events(struct harvester *self, int most, int64_t wait_ns) {
#ifdef SYS_epoll_pwait2
    if (wait_ns && !self->no_pwait2) {
        struct timespec limit = {wait_ns / 1000000000, wait_ns % 1000000000};
        long count = syscall(
            SYS_epoll_pwait2, self->epoll_fd, self->events, most, wait_ns < 0 ? NULL : &limit, NULL, 0
        );
        if (count >= 0 || errno != ENOSYS) return (int)count;
    }
#endif
    self->no_pwait2 |= wait_ns != 0;
    return epoll_wait(self->epoll_fd, self->events, most, 0);
}

/* Read all of a stream that is there, up to the first read beyond its limit (whoever is woken then
 * gives it up: a server that writes faster than we read would keep us here for ever); the number
 * of wakes. */
static int read_stream(
    struct harvester *self, struct stream *stream, int fd, uint32_t events, int64_t bound_ns,
    struct wake *wake
) {
    /* An end that came with the data has no edge of its own. */
    int to_the_end = (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    int32_t error = 0;
    enum wake_kind seen = 0, kind;
    ssize_t came;
    int num_reads = 0; /* without end if a server sends TLS records that hold no plain byte */
    do {
        kind = read_once(self, stream, fd, bound_ns, &error, &came);
        if (kind) seen = kind;
    } while (
        came && (came == READ_BYTES || to_the_end) && kind <= MAY_HAVE_ENDED &&
        stream->num_bytes <= stream->limit_bytes && ++num_reads < MOST_READS
    );
    if (num_reads == MOST_READS) {
        seen = FAILED;
        error = EMSGSIZE;
    }
    if (!seen) return 0;
    *wake = (struct wake){fd, seen, events, error};
    return 1;
}

/* Read whatever is ready, waiting for it if told to; the number of wakes, or -1 with errno. */
static int harvest(
    struct harvester *self, struct wake *wakes, int capacity, int64_t wait_ns, int *num_ready
) {
    /* What is read below was not ready when the last poll returned, so it came after that poll
       began; taken before the poll, the bound holds for what comes during it. */
    int64_t bound_ns = self->harvested_ns;
    self->harvested_ns = monotonic_ns();
    int count = wait_for_events(self, capacity / 2, wait_ns);
    *num_ready = count;
    if (count < 0) return -1;
    int num_wakes = 0;
    for (int i = 0; i < count; i++) {
        int fd = self->events[i].data.fd;
        uint32_t events = self->events[i].events;
        struct stream *stream = fd < self->num_slots ? self->streams[fd] : NULL;
        if (stream == NULL) {
            wakes[num_wakes++] = (struct wake){fd, NO_STREAM, events, 0};
            continue;
        }
        if (events & EPOLLOUT) wakes[num_wakes++] = (struct wake){fd, WRITABLE, events, 0};
        if (events & ~(uint32_t)EPOLLOUT)
            num_wakes += read_stream(self, stream, fd, events, bound_ns, &wakes[num_wakes]);
    }
    return num_wakes;
}

/* Read streams until somebody must be told or the time is over.

timeout_ns  -1: no limit; 0: what is ready now
tick_ns     0, or look this often even while nothing comes, which keeps the bound of each read near;
            without, one call waits and harvests, and the bound is the call's before
wakes       room for `capacity`, two for each descriptor of the epoll

The number of wakes; 0 also when a signal came. -1 with errno if the epoll fails. */
int harvester_wait(
    struct harvester *self, int64_t timeout_ns, int64_t tick_ns, struct wake *wakes, int capacity
) {
    if (self->num_events < capacity) {
        struct epoll_event *grown = realloc(self->events, (size_t)capacity * sizeof *grown);
        if (grown == NULL) return -1;
        self->events = grown;
        self->num_events = capacity;
    }
    int64_t deadline_ns = timeout_ns > 0 ? monotonic_ns() + timeout_ns : -1;
    int64_t left_ns = timeout_ns;
    for (;;) {
        int num_ready = 0;
        int waits = tick_ns == 0 && !self->no_pwait2;
        int num_wakes = harvest(self, wakes, capacity, waits ? left_ns : 0, &num_ready);
        if (num_wakes < 0) return errno == EINTR ? 0 : -1;
        if (num_wakes || timeout_ns == 0) return num_wakes;
        if (deadline_ns >= 0) {
            left_ns = deadline_ns - monotonic_ns();
            if (left_ns <= 0) return 0;
        }
        if (waits || num_ready) continue; /* busy: what came meanwhile is read without a wait */
        int64_t wait_ns = tick_ns && (left_ns < 0 || tick_ns < left_ns) ? tick_ns : left_ns;
        struct timespec limit = {wait_ns / 1000000000, wait_ns % 1000000000};
        struct pollfd ready = {.fd = self->epoll_fd, .events = POLLIN};
        if (ppoll(&ready, 1, wait_ns < 0 ? NULL : &limit, NULL) < 0) return errno == EINTR ? 0 : -1;
    }
}
