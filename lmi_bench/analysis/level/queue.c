/* One copy under requests in a given order: `_Copy` of queueing.py, number for number.
 *
 * The caller prices the steps: queue_run() asks for the time of a step with prompts, or for the
 * line of a number of decoding rows, and goes on with the answer. Nothing calls back into Python,
 * so a Ctrl-C between two calls leaves a whole state to free.
 */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum answer { DONE, ASK_PROMPTS, ASK_LINE, STUCK };

/* In the order of queue_new's `limits`; FIRST: requests in sent_s, the others follow an answer. */
enum limit {
    PAGED, CHUNKED, BLOCK_SIZE, CACHE_TOKENS, MAX_RUNNING, MAX_PREFILL, MAX_WAITING, SHARED, FIRST,
    NUM_LIMITS
};
enum price { WAITING_RATIO, OVERHEAD_S, SLOWER, WINDOW, SLIDING, HOST_S, HOST_ROW_S, NUM_PRICES };

/* A step with prompts, in the order of a Pricer's arguments; for ASK_LINE only the rows. */
enum asked { ROWS, CONTEXT, PROMPTS, TOKENS, PAIRS, CACHED, NUM_ASKED };

/* found: prompt tokens in the prefix cache; ends: number of its last decode step, -1: not decoding */
struct request {
    int64_t prompt, output, found, computed, produced, ends;
    double sent_s, first_s, last_s, end_s;
};

struct part {
    int64_t number, tokens;
};

struct ending {
    int64_t ends, number;
};

struct since {
    double at_s;
    int64_t count;
};

/* What the caller gets beside the requests' times, rows of doubles: seconds, count and end of a gap;
 * decode steps of a run, and the ends of its first and last one; a sequence's start or return:
 * request, tokens it had, decode steps so far, and when it got the next token. */
enum table { GAPS, RUNS, STARTS, NUM_TABLES };
static const int64_t WIDTHS[NUM_TABLES] = {3, 3, 4};

struct table_rows {
    double *values;
    int64_t count, room;
};

struct queue {
    int64_t limits[NUM_LIMITS];
    double prices[NUM_PRICES], asked[NUM_ASKED];
    int64_t total, sent, arrived;
    /* When requests are sent: num_first that are known from the start (an open loop, or each user's
     * first one), then those that follow an answer. first, again: the next one of each part. */
    int64_t num_first, first, again;
    double *sends_s;
    struct request *requests;
    int64_t *waiting, first_waiting, num_waiting; /* a ring of `total` */
    int64_t *running, num_running, *filling, num_filling;
    struct part *chosen;
    int64_t num_chosen;
    struct since *since;
    int64_t num_since;
    struct ending *heap;
    int64_t num_ending, room_ending;
    int64_t *phases;
    double *lines; /* time of the step and of a context token by rows; NAN: not known yet */
    struct table_rows tables[NUM_TABLES];
    double now_s, decoded_s;
    int64_t steps, rows, context, reserved, to_fill;
    int64_t decoded; /* the JoinRule's state */
    bool has_joined, is_stuck;
    enum answer pending;
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t modulo(int64_t a, int64_t n) {
    int64_t rest = a % n;
    return rest < 0 ? rest + n : rest;
}

static int64_t floor_divided(int64_t a, int64_t n) { return (a - modulo(a, n)) / n; }

/* The array with room for another element; `is_stuck` without memory. */
static void *grown(struct queue *q, void *array, int64_t count, int64_t *room, size_t size) {
    if (count < *room) return array;
    void *larger = realloc(array, (size_t)(2 * *room + 64) * size);
    if (larger == NULL) {
        q->is_stuck = true;
        return array;
    }
    *room = 2 * *room + 64;
    return larger;
}

static void add_row(struct queue *q, enum table table, const double *row) {
    struct table_rows *rows = q->tables + table;
    size_t bytes = (size_t)WIDTHS[table] * sizeof *row;
    rows->values = grown(q, rows->values, rows->count, &rows->room, bytes);
    if (!q->is_stuck) memcpy(rows->values + WIDTHS[table] * rows->count++, row, bytes);
}

static void add_gap(struct queue *q, double seconds, int64_t count, double end_s) {
    add_row(q, GAPS, (double[]){seconds, (double)count, end_s});
}

static void count_since(struct queue *q, double at_s, int64_t more) {
    for (int64_t place = q->num_since - 1; place >= 0; place--)
        if (q->since[place].at_s == at_s) {
            q->since[place].count += more;
            return;
        }
    if (q->num_since > q->total + 1) /* at most one for each request's start */
        q->is_stuck = true;
    else
        q->since[q->num_since++] = (struct since){at_s, more};
}

static bool before(struct ending a, struct ending b) {
    return a.ends < b.ends || (a.ends == b.ends && a.number < b.number);
}

static void push_ending(struct queue *q, struct ending item) {
    q->heap = grown(q, q->heap, q->num_ending, &q->room_ending, sizeof item);
    if (q->is_stuck) return;
    int64_t at = q->num_ending++;
    for (; at && before(item, q->heap[(at - 1) / 2]); at = (at - 1) / 2)
        q->heap[at] = q->heap[(at - 1) / 2];
    q->heap[at] = item;
}

static struct ending pop_ending(struct queue *q) {
    struct ending top = q->heap[0], item = q->heap[--q->num_ending];
    int64_t at = 0;
    for (int64_t child = 1; child < q->num_ending; child = 2 * at + 1) {
        if (child + 1 < q->num_ending && before(q->heap[child + 1], q->heap[child])) child++;
        if (!before(q->heap[child], item)) break;
        q->heap[at] = q->heap[child];
        at = child;
    }
    q->heap[at] = item;
    return top;
}

static void take_out(int64_t *numbers, int64_t *count, int64_t number) {
    int64_t at = 0;
    while (at < *count && numbers[at] != number) at++;
    if (at == *count) return;
    memmove(numbers + at, numbers + at + 1, (size_t)(--*count - at) * sizeof *numbers);
}

static int64_t waiting_at(const struct queue *q, int64_t place) {
    return q->waiting[(q->first_waiting + place) % q->total];
}

/* Place of the next request in sends_s: a user may be answered before the last one has begun. */
static int64_t *next_send(struct queue *q) {
    if (q->first == q->num_first) return &q->again;
    bool is_first = q->again == q->sent || q->sends_s[q->first] <= q->sends_s[q->again];
    return is_first ? &q->first : &q->again;
}

static double arrival_s(struct queue *q) {
    return q->sends_s[*next_send(q)] + q->prices[OVERHEAD_S];
}

static void arrive(struct queue *q) {
    q->requests[q->arrived].sent_s = q->sends_s[(*next_send(q))++];
    q->waiting[(q->first_waiting + q->num_waiting++) % q->total] = q->arrived++;
}

static int64_t tokens_to_fill(const struct request *r) { return r->prompt + r->produced; }

static int64_t block_tokens(const struct queue *q, int64_t tokens) {
    int64_t size = q->limits[BLOCK_SIZE];
    return (tokens + size - 1) / size * size;
}

static int64_t free_tokens(const struct queue *q, int64_t later) {
    int64_t held = q->context + q->to_fill + (q->limits[BLOCK_SIZE] - 1 + later) * q->rows;
    held -= q->limits[SHARED] * most(0, q->num_running - 1);
    return q->limits[CACHE_TOKENS] - held;
}

static bool has_room(const struct queue *q, int64_t tokens, int64_t later) {
    int64_t size = q->limits[BLOCK_SIZE], empty = 0;
    int64_t fewest = free_tokens(q, later), more = (size - 1) * q->rows;
    if (tokens <= fewest || tokens > fewest + more) return tokens <= fewest;
    for (int64_t phase = 0; phase < size; phase++)
        empty += q->phases[phase] * modulo(-(phase + q->steps + later), size);
    return tokens <= fewest + more - empty;
}

static void count_tokens(struct queue *q, int64_t tokens, int64_t more) {
    q->phases[modulo(tokens - q->steps, q->limits[BLOCK_SIZE])] += more;
    q->rows += more;
    q->context += more * tokens;
}

static void stop_decoding(struct queue *q, struct request *r) {
    r->ends = -1;
    count_tokens(q, tokens_to_fill(r), -1);
    count_since(q, r->last_s, -1);
}

static void make_room(struct queue *q) {
    while (q->limits[PAGED] && q->num_running > 1 && !has_room(q, 0, 0)) {
        int64_t number = q->running[--q->num_running];
        struct request *youngest = q->requests + number;
        if (youngest->ends < 0) {
            take_out(q->filling, &q->num_filling, number);
            q->to_fill -= block_tokens(q, tokens_to_fill(youngest));
        } else {
            youngest->produced = youngest->output - (youngest->ends - q->steps);
            if (q->decoded_s > youngest->last_s) youngest->last_s = q->decoded_s;
            stop_decoding(q, youngest);
        }
        youngest->computed = youngest->found;
        q->first_waiting = (q->first_waiting + q->total - 1) % q->total;
        q->waiting[q->first_waiting] = number;
        q->num_waiting++;
    }
}

/* Whether the cache takes the first waiting requests beside a block more for each running one. */
static bool fit(const struct queue *q, int64_t heads) {
    int64_t needed = q->limits[PAGED] ? q->limits[BLOCK_SIZE] * (q->num_running + heads - 1)
                                     : q->reserved;
    for (int64_t place = 0; place < heads; place++) {
        const struct request *each = q->requests + waiting_at(q, place);
        needed += q->limits[PAGED] ? block_tokens(q, tokens_to_fill(each))
                                  : block_tokens(q, each->prompt + each->output);
    }
    if (!q->limits[PAGED]) return needed <= q->limits[CACHE_TOKENS];
    return has_room(q, needed, q->limits[CHUNKED] ? 0 : -1);
}

static bool head_fits(const struct queue *q) {
    return q->num_waiting && q->num_running < q->limits[MAX_RUNNING] && fit(q, 1);
}

static int64_t steps_to_wait(const struct queue *q) {
    return q->has_joined ? 1 : most(1, q->limits[MAX_WAITING] - 1 - q->decoded);
}

static bool may_join(const struct queue *q) {
    if (!q->limits[MAX_WAITING] || !q->num_running) return true;
    if (q->has_joined) return false;
    if (1 + q->decoded >= q->limits[MAX_WAITING]) return true;
    double joiners = q->prices[WAITING_RATIO] * (double)q->num_running; /* to be rounded down */
    if (joiners < 1) return true;
    int64_t room = least(q->limits[MAX_RUNNING] - q->num_running, q->num_waiting);
    if (joiners >= (double)(room + 1)) return false;
    int64_t tokens = 0, heads = (int64_t)joiners;
    for (int64_t place = 0; place < heads; place++) {
        const struct request *each = q->requests + waiting_at(q, place);
        tokens += tokens_to_fill(each) - each->found;
    }
    return tokens <= q->limits[MAX_PREFILL] && fit(q, heads);
}

/* Prompts of the next step, begun ones first. */
static void choose_prompts(struct queue *q) {
    int64_t limit = q->limits[MAX_PREFILL], budget = limit;
    int64_t running = q->num_running, begun = q->num_filling;
    q->num_chosen = 0;
    while (budget) {
        bool is_new = q->num_chosen >= begun;
        if (is_new && !((q->num_running > running || may_join(q)) && head_fits(q))) return;
        int64_t number = is_new ? waiting_at(q, 0) : q->filling[q->num_chosen];
        struct request *r = q->requests + number;
        int64_t filled = tokens_to_fill(r), tokens = filled - r->computed;
        if (tokens > budget) tokens = q->limits[CHUNKED] || filled > limit ? budget : 0;
        if (!tokens) return;
        if (is_new) {
            q->first_waiting = (q->first_waiting + 1) % q->total;
            q->num_waiting--;
            q->running[q->num_running++] = number;
            q->filling[q->num_filling++] = number;
            q->to_fill += block_tokens(q, filled);
            q->reserved += block_tokens(q, r->prompt + r->output);
        }
        q->chosen[q->num_chosen++] = (struct part){number, tokens};
        budget -= tokens;
    }
}

static void start(struct queue *q, int64_t number) {
    struct request *r = q->requests + number;
    double produced = (double)r->produced, steps = (double)q->steps;
    add_row(q, STARTS, (double[]){(double)number, produced, steps, q->now_s});
    if (r->produced) {
        add_gap(q, q->now_s - r->last_s, 1, q->now_s);
    } else {
        r->first_s = q->now_s;
    }
    r->produced++;
    r->last_s = q->now_s;
    r->ends = q->steps + r->output - r->produced;
    push_ending(q, (struct ending){r->ends, number});
    count_tokens(q, tokens_to_fill(r), 1);
    count_since(q, q->now_s, 1);
}

/* Every decoding sequence gets `steps` tokens, the first after `first_s`. */
static void end_decoding(struct queue *q, int64_t steps, double first_s, double took_s) {
    double now_s = q->now_s + first_s;
    for (const struct since *each = q->since; each < q->since + q->num_since; each++)
        if (each->count) add_gap(q, now_s - each->at_s, each->count, now_s);
    double first_end_s = now_s;
    if (steps > 1) {
        now_s += took_s - first_s;
        add_gap(q, (took_s - first_s) / (double)(steps - 1), q->rows * (steps - 1), now_s);
    }
    add_row(q, RUNS, (double[]){(double)steps, first_end_s, now_s});
    q->now_s = q->decoded_s = now_s;
    q->steps += steps;
    q->decoded += steps;
    q->has_joined = false;
    q->context += steps * q->rows;
    q->num_since = 0;
    count_since(q, now_s, q->rows);
}

/* Take out what has ended; as many users send again. */
static void end_requests(struct queue *q) {
    int64_t running = q->num_running;
    while (q->num_ending) {
        struct ending top = q->heap[0];
        if (top.ends > q->steps && top.ends == q->requests[top.number].ends) break;
        struct ending item = pop_ending(q);
        struct request *r = q->requests + item.number;
        if (item.ends != r->ends) continue; /* it was sent back in between */
        r->produced = r->output;
        r->last_s = r->end_s = q->now_s;
        stop_decoding(q, r);
        take_out(q->running, &q->num_running, item.number);
        q->reserved -= block_tokens(q, r->prompt + r->output);
    }
    for (int64_t ended = running - q->num_running; ended > 0 && q->sent < q->total; ended--)
        q->sends_s[q->sent++] = q->now_s;
}

static double decode_s(const struct queue *q, int64_t context) {
    double rows = (double)q->rows, token_s = q->lines[2 * q->rows + 1];
    double seconds = q->lines[2 * q->rows] + token_s * (double)context;
    double seen = rows * q->prices[WINDOW];
    if ((double)context > seen) seconds -= token_s * q->prices[SLIDING] * ((double)context - seen);
    if (!(seconds > q->prices[HOST_S])) seconds = q->prices[HOST_S];
    return q->prices[SLOWER] * (seconds + q->prices[HOST_ROW_S] * rows);
}

/* Fewest steps that last `span_s`, each longer than the one before. */
static int64_t steps_until(double span_s, double first_s, double last_s, int64_t limit) {
    double slope = (last_s - first_s) / (double)most(1, limit - 1), half = first_s - slope / 2;
    double steps = span_s / first_s;
    if (slope > 1e-12 * first_s) steps = (-half + sqrt(half * half + 2 * slope * span_s)) / slope;
    return most(1, least(limit, (int64_t)steps + 1));
}

/* Decode until a sequence ends, a request arrives that may run, or the cache is full. */
static void decode(struct queue *q) {
    if (!q->num_ending || q->rows < 1) {
        q->is_stuck = true;
        return;
    }
    if (isnan(q->lines[2 * q->rows])) {
        q->asked[ROWS] = (double)q->rows;
        q->pending = ASK_LINE;
        return;
    }
    int64_t steps = q->heap[0].ends - q->steps;
    if (q->limits[PAGED])
        steps = most(1, least(steps, 1 + floor_divided(free_tokens(q, 0), q->rows)));
    bool waits = head_fits(q);
    if (waits) steps = least(steps, steps_to_wait(q));
    double until_s = INFINITY;
    if (q->arrived < q->sent && (waits || !q->num_waiting)) until_s = arrival_s(q) - q->now_s;
    double first_s = decode_s(q, q->context), last_s = first_s;
    if (steps > 1) {
        last_s = decode_s(q, q->context + (steps - 1) * q->rows);
        if (until_s < (double)steps * (first_s + last_s) / 2) {
            steps = steps_until(until_s, first_s, last_s, steps);
            last_s = decode_s(q, q->context + (steps - 1) * q->rows);
        }
    }
    end_decoding(q, steps, first_s, (double)steps * (first_s + last_s) / 2);
    end_requests(q);
}

/* The step of the chosen prompts, whose time is now known. */
static void prefill(struct queue *q, double took_s) {
    if (q->asked[ROWS] > 0)
        end_decoding(q, 1, took_s, took_s);
    else
        q->now_s += took_s;
    for (int64_t place = 0; place < q->num_chosen; place++) {
        int64_t number = q->chosen[place].number;
        struct request *r = q->requests + number;
        r->computed += q->chosen[place].tokens;
        if (r->computed == tokens_to_fill(r)) {
            take_out(q->filling, &q->num_filling, number);
            q->to_fill -= block_tokens(q, tokens_to_fill(r));
            start(q, number);
        }
    }
    end_requests(q);
}

static void ask_for_prompts(struct queue *q) {
    double *asked = q->asked;
    memset(asked, 0, sizeof q->asked);
    if (q->limits[CHUNKED] && q->rows) {
        asked[ROWS] = (double)q->rows;
        asked[CONTEXT] = (double)q->context;
    }
    asked[PROMPTS] = (double)q->num_chosen;
    for (int64_t place = 0; place < q->num_chosen; place++) {
        double tokens = (double)q->chosen[place].tokens;
        double computed = (double)q->requests[q->chosen[place].number].computed;
        asked[TOKENS] += tokens;
        asked[PAIRS] += tokens * (computed + (tokens + 1) / 2);
        asked[CACHED] += computed;
    }
    q->pending = ASK_PROMPTS;
}

static void step(struct queue *q) {
    if (q->limits[CHUNKED]) make_room(q);
    int64_t running = q->num_running;
    q->num_chosen = 0;
    if (q->num_filling || q->num_waiting) choose_prompts(q);
    if (q->num_chosen) {
        if (q->num_running > running) {
            q->decoded = 0;
            q->has_joined = running > 0;
        }
        ask_for_prompts(q);
        return;
    }
    if (!q->limits[CHUNKED]) make_room(q);
    decode(q);
}

/* Go on until all requests have ended or a time is needed, named in `asked`. first, second: the
 * answer to what was asked before, the seconds of a step with prompts or both numbers of a line.
 * STUCK: no memory, or a request that no step takes. */
enum answer queue_run(struct queue *q, double first, double second, double *asked) {
    if (q == NULL) return STUCK;
    enum answer answered = q->pending;
    q->pending = DONE;
    if (answered == ASK_PROMPTS) {
        prefill(q, first);
    } else if (answered == ASK_LINE) {
        q->lines[2 * q->rows] = first;
        q->lines[2 * q->rows + 1] = second;
        decode(q);
    }
    while (!q->is_stuck && q->pending == DONE) {
        bool idle = !q->num_waiting && !q->num_running;
        if (idle && q->arrived == q->sent) break;
        if (idle && arrival_s(q) > q->now_s) q->now_s = arrival_s(q);
        while (q->arrived < q->sent && arrival_s(q) <= q->now_s) arrive(q);
        step(q);
    }
    memcpy(asked, q->asked, sizeof q->asked);
    return q->is_stuck ? STUCK : q->pending;
}

void queue_free(struct queue *q) {
    if (q == NULL) return;
    free(q->requests); /* with the arrays behind them */
    free(q->heap);
    for (int table = 0; table < NUM_TABLES; table++) free(q->tables[table].values);
    free(q);
}

/* limits: those of `enum limit`, then of `enum price`; lengths: prompt, output and found tokens of
 * each request; sent_s: of an open loop's requests, or of each user's first one. NULL without
 * memory. */
struct queue *queue_new(const double *limits, int64_t total, const double *lengths,
                        const double *sent_s) {
    struct queue *q = calloc(1, sizeof *q);
    if (q == NULL) return NULL;
    for (int place = 0; place < NUM_LIMITS; place++) q->limits[place] = (int64_t)limits[place];
    memcpy(q->prices, limits + NUM_LIMITS, sizeof q->prices);
    int64_t lines = 2 * (least(total, q->limits[MAX_RUNNING]) + 1);
    q->total = total;
    q->sent = q->num_first = q->again = q->limits[FIRST];
    size_t count = (size_t)total, phases = (size_t)q->limits[BLOCK_SIZE];
    size_t bytes = count * (sizeof *q->requests + 3 * sizeof *q->waiting + sizeof *q->chosen);
    bytes += count * sizeof *q->sends_s;
    bytes += (count + 2) * sizeof *q->since + phases * sizeof *q->phases;
    q->requests = calloc(1, bytes + (size_t)lines * sizeof *q->lines);
    if (q->requests == NULL) {
        queue_free(q);
        return NULL;
    }
    q->since = (struct since *)(q->requests + count);
    q->chosen = (struct part *)(q->since + count + 2);
    q->waiting = (int64_t *)(q->chosen + count);
    q->running = q->waiting + count;
    q->filling = q->running + count;
    q->phases = q->filling + count;
    q->sends_s = (double *)(q->phases + phases);
    q->lines = q->sends_s + count;
    for (int64_t place = 0; place < lines; place++) q->lines[place] = NAN;
    for (int64_t number = 0; number < total; number++) {
        const double *own = lengths + 3 * number;
        struct request *r = q->requests + number;
        r->prompt = (int64_t)own[0];
        r->output = (int64_t)own[1];
        r->found = r->computed = (int64_t)own[2];
        r->ends = -1;
    }
    memcpy(q->sends_s, sent_s, (size_t)q->sent * sizeof *sent_s);
    return q;
}

int64_t queue_num_rows(const struct queue *q, int64_t table) { return q->tables[table].count; }

/* times_s: sent, first and last token of each request; tables: one after the other */
void queue_result(const struct queue *q, double *times_s, double *tables) {
    for (const struct request *r = q->requests; r < q->requests + q->total; r++) {
        *times_s++ = r->sent_s;
        *times_s++ = r->first_s;
        *times_s++ = r->end_s;
    }
    for (int table = 0; table < NUM_TABLES; table++) {
        int64_t size = WIDTHS[table] * q->tables[table].count;
        if (size) memcpy(tables, q->tables[table].values, (size_t)size * sizeof *tables);
        tables += size;
    }
}
