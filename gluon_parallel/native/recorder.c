/* Flight recorder: writes entries, and runs in MXNet's engine before and behind exchanges of other libraries. */
#include "recorder.h"

static RingEntry *entry_of(Recorder *recorder, int64_t number)
{
    return &recorder->memory->ring[number % CAPACITY];
}

EXPORT int64_t gp_recorder_begin(Recorder *recorder, int64_t name, int64_t call, int64_t size)
{
    int64_t number = ++recorder->memory->num_begun;
    RingEntry *entry = entry_of(recorder, number);
    entry->number = 0;
    entry->name = name;
    entry->call = call;
    entry->size = size;
    entry->asked = now(CLOCK_MONOTONIC);
    entry->done = 0;
    entry->number = number;
    return number;
}

EXPORT void gp_recorder_end(Recorder *recorder, int64_t number, int64_t done)
{
    RingEntry *entry = entry_of(recorder, number);
    if (entry->number == number)
        entry->done = done ? done : now(CLOCK_MONOTONIC);
}

/* The engine calls these when the arrays that an exchange reads are ready, and when its results are there. */
EXPORT void gp_recorded_begin(void *run_context, const OnComplete *on_complete, RecordedExchange *exchange)
{
    (void)run_context;
    exchange->record = gp_recorder_begin(exchange->recorder, exchange->name, exchange->call, exchange->size);
    complete(on_complete, 0);
}

EXPORT void gp_recorded_end(void *run_context, const OnComplete *on_complete, RecordedExchange *exchange)
{
    (void)run_context;
    gp_recorder_end(exchange->recorder, exchange->record, 0);
    exchange->busy = 0;
    complete(on_complete, 0);
}
