/* The custom operator's description: what MXNet asks for before it makes an instance, and the making of both.

   MXNet takes any result but 0 for a success. An exception in a Python callback leaves just any result, and Ctrl-C can
   raise one before the callback's first line; so only these functions answer MXNet. Python's part of an answer is in
   memory when it is complete. MXNet calls them in the thread that traces or launches the operator. */
#include "external.h"
#include "sync_batch_norm.h"

enum { DATA, Y = 3 };                            /* of x, gamma, beta; y; running mean and variance */
enum { IS_FLOAT32 = 0, IS_FLOAT16 = 2, UNKNOWN = -1 }; /* MXNet's numbers of dtypes */

EXPORT int gp_list(const char ***result, const char **names)
{
    *result = names;
    return 1;
}

/* x (..., C, ...) gives y of its shape, and (C,) for the rest. */
EXPORT int gp_infer_shape(int num, int *num_axes, int **shapes, const Description *description)
{
    int size = num_axes[DATA], *data = shapes[DATA];
    if (size <= 0) { /* not known yet */
        for (int n = 0; n < num; n++)
            num_axes[n] = n >= Y || num_axes[n] < 0 ? 0 : num_axes[n];
        return 1;
    }
    int64_t axis = description->axis + (description->axis < 0 ? size : 0);
    if (axis < 0 || axis >= size)
        return 0;
    for (int n = 0; n < num; n++)
        if (n != DATA && n != Y)
            num_axes[n] = 1, shapes[n] = data + axis;
    num_axes[Y] = size, shapes[Y] = data;
    return 1;
}

/* y is like x; the rest float32 beside float16, else like x unless it is known. */
EXPORT int gp_infer_type(int num, int *dtypes, const Description *description)
{
    (void)num, (void)description;
    for (int n = 1; n < Y; n++)
        if (dtypes[n] == UNKNOWN)
            dtypes[n] = dtypes[DATA] == IS_FLOAT16 ? IS_FLOAT32 : dtypes[DATA];
    dtypes[Y] = dtypes[DATA], dtypes[Y + 1] = dtypes[1], dtypes[Y + 2] = dtypes[2];
    return 1;
}

/* What MXNet keeps for the backward pass: dy, x, gamma, and y where that is asked for. */
EXPORT int gp_declare_backward_dependency(const int *dy, const int *inputs, const int *outputs, int *num, int **result,
                                          const Description *description)
{
    (void)dy, (void)inputs, (void)outputs;
    *num = (int)description->num_dependencies;
    *result = description->dependencies;
    return 1;
}

/* An instance for one device. */
EXPORT int gp_create(const char *device, int num, unsigned **shapes, const int *num_axes, const int *dtypes,
                     CallbackList *result, Description *description)
{
    result->num = 0;
    gp_external.create(device, num, shapes, num_axes, dtypes, result, description);
    return result->num != 0;
}

/* What MXNet calls to delete a description that could not be made. */
static int nothing(void *context)
{
    (void)context;
    return 1;
}

/* A description for these attributes; after a failure one that does nothing, which MXNet deletes all the same. */
EXPORT int gp_describe(const char *name, int num, char **keys, char **values, CallbackList *result)
{
    static void *functions[] = {(void *)nothing}, *contexts[] = {0};
    (void)name;
    *result = (CallbackList){1, functions, contexts};
    gp_external.describe(num, keys, values, result);
    return result->num != 1;
}
