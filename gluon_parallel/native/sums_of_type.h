/* Sum of arrays of the type VALUE; see `sums.h`. */
static void TYPED(sum)(char *const *sources, int64_t offset, int64_t num, char *out, int64_t first_value, int64_t last_value)
{
    for (int64_t begin = first_value; begin < last_value; begin += BLOCK) {
        int64_t size = last_value - begin < BLOCK ? last_value - begin : BLOCK;
        VALUE *restrict block = (VALUE *)out + begin;
        const VALUE *first = (const VALUE *)(sources[0] + offset) + begin;
        int64_t next = 1;
        if (first != block && num > 1) { /* in one pass */
            const VALUE *restrict one = first, *restrict two = (const VALUE *)(sources[1] + offset) + begin;
            for (int64_t i = 0; i < size; i++)
                block[i] = one[i] + two[i];
            next = 2;
        } else if (first != block) {
            memcpy(block, first, (size_t)size * sizeof(VALUE));
        }
        for (; next < num; next++) {
            const VALUE *restrict other = (const VALUE *)(sources[next] + offset) + begin;
            for (int64_t i = 0; i < size; i++)
                block[i] += other[i];
        }
    }
}
