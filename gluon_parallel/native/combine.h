/* Statistics of devices or processes, combined exactly for shards of any size. */
#ifndef COMBINE_H
#define COMBINE_H

#include <stdint.h>

enum { FORWARD, BACKWARD }; /* directions: moments, and sums */

#define HEADER 2 /* numbers before the values of a message: how many processes take part, and the call's number */

/* Combine `num` rows of `size` numbers, `stride` numbers apart, into `result`, which is none of them.

   FORWARD: a row is (1 + 2C,) moments: the count, C means, C sums of squared deviations from the mean; a row of count 0
   holds finite numbers. BACKWARD: a row is (2C,) sums. */
void combine(const double *rows, int64_t num, int64_t stride, int64_t size, int64_t direction, double *result);

/* Python calls these: rows (num, size), result (size,). Of messages the header is combined as well; the call's number
   becomes NaN where the processes' numbers differ. */
void gp_combine_statistics(const double *rows, int64_t num, int64_t size, int64_t direction, double *result);
void gp_combine_messages(const double *rows, int64_t num, int64_t size, int64_t direction, double *result);

#endif
