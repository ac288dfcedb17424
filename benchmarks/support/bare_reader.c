/* A client that only reads: what a core can take from the truth server, for benchmarks/receiver_limit.py.

   cc -O2 -o bare_reader bare_reader.c && ./bare_reader PORT STREAMS ROUNDS WAY

WAY bare: epoll and one recvmsg with the kernel's time for each event, nothing kept; harvest: the product's
own harvest.c, its reads kept with their times. Prints its CPU seconds as JSON. */

#include HARVEST
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <sys/resource.h>

static const char REQUEST[] =
    "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}";
static int num_streams, num_done;
static int *rounds_left; /* by descriptor */

static double cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec +
           (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void ask(int fd) {
    if (write(fd, REQUEST, sizeof REQUEST - 1) < 0) perror("write");
}

/* The last of these bytes is a response's end: ask again, or count the stream as done. */
static int ended(const uint8_t *data, int64_t num_bytes) {
    return num_bytes >= 5 && memcmp(data + num_bytes - 5, "0\r\n\r\n", 5) == 0;
}

static void next(int fd) {
    if (--rounds_left[fd] > 0) ask(fd);
    else num_done++;
}

static void read_bare(int epoll_fd) {
    static struct epoll_event events[4096];
    static uint8_t bytes[65536];
    while (num_done < num_streams) {
        int count = epoll_wait(epoll_fd, events, 4096, 1000);
        for (int i = 0; i < count; i++) {
            char control[64];
            struct iovec place = {bytes, sizeof bytes};
            struct msghdr message = {
                .msg_iov = &place, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control
            };
            ssize_t num_bytes = recvmsg(events[i].data.fd, &message, MSG_DONTWAIT);
            if (num_bytes <= 0) continue;
            if (ended(bytes, num_bytes)) next(events[i].data.fd);
        }
    }
}

static void read_harvest(struct harvester *harvester) {
    int capacity = 2 * num_streams + 128;
    struct wake *wakes = calloc((size_t)capacity, sizeof *wakes);
    while (num_done < num_streams) {
        int count = harvester_wait(harvester, 100000000, 0, wakes, capacity);
        for (int i = 0; i < count; i++) {
            struct stream *stream = harvester->streams[wakes[i].fd];
            if (!ended(stream->data, stream->num_bytes)) continue;
            stream_restart(stream, INT64_C(1) << 28);
            stream->chunked = 1;
            next(wakes[i].fd);
        }
    }
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    num_streams = atoi(argv[2]);
    int harvests = strcmp(argv[4], "harvest") == 0, one = 1;
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    rounds_left = calloc((size_t)num_streams + 4096, sizeof *rounds_left);
    int *fds = calloc((size_t)num_streams, sizeof *fds), epoll_fd = epoll_create1(0);
    struct harvester *harvester = harvester_new(epoll_fd);
    struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[1]))};
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < num_streams; i++) {
        int fd = fds[i] = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&server, sizeof server)) {
            perror("connect");
            return 1;
        }
        fcntl(fd, F_SETFL, O_NONBLOCK);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
        rounds_left[fd] = atoi(argv[3]);
        if (harvests) {
            struct stream *stream = harvester_add(harvester, fd);
            stream_restart(stream, INT64_C(1) << 28);
            stream->chunked = 1;
        }
        struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data.fd = fd};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
    double cpu = cpu_s();
    for (int i = 0; i < num_streams; i++) {
        ask(fds[i]);
        if (i % 64 == 63) usleep(500);
    }
    if (harvests) read_harvest(harvester);
    else read_bare(epoll_fd);
    printf("{\"cpu_s\": %.4f}\n", cpu_s() - cpu);
    return 0;
}
