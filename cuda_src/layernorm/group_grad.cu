// layernorm/group_grad.cu: the gradient of y = act(xh scale + bias), xh = (x - mean) rstd, in groups of channels.
// Idea     : z = xh scale + bias is worked out again, dz = dy act'(z). group_sums: the sums of dz and dz (x - mean)
//            of each image's channel, in `splits` parts. group_params adds them up: a block for each image's group
//            gives the means that dx takes, a warp a channel dbias and dscale. group_dx reads x and dy once
//            more: dx = scale rstd dz - mean(scale dz) rstd - (x - mean) rstd^3 mean(scale dz (x - mean)).
//            LAST: channels are last; a thread has a vector of VEC channels, and in group_sums TX of them stand side
//            by side in a block. Else TEAM threads walk along one channel's pixels.
// Inputs   : x, dy T [images, channels, pixels], or LAST [images, pixels, channels]; VEC divides what is last.
//            scale, bias P [channels]; mean, variance ACC [images, channels / per].
// Outputs  : part ACC [images, 2, channels, splits]; dscale, dbias P (or null); means ACC [images, channels / per, 2];
//            dx T.
// Macros   : T P ACC VEC LAST TX TEAM, ACT (common.cuh's).   Launch: 256 threads.
// Numerics : ACC; the order depends on the shape alone.
// Bound    : HBM, x and dy twice, dx once.
#include "layernorm/channels.cuh"
constexpr int ROWS = 4;
constexpr int DX_ROWS = LAST && ACT_NORMAL ? 2 : ROWS;  // what registers hold beside five numbers a channel
constexpr int PARTS = sizeof(ACC) > 4 ? 1 : 8;  // a double's square root is a call, around which others would spill

// d loss / dz of elements at which x - mean is `centred`.
DEVICE ACC slope(T dy, ACC centred, ACC a, ACC b, float alpha) {
    if (!ACTIVE) return (ACC)widen(dy);
    return (ACC)act_slope<T>((float)widen(dy), (float)(centred * a + b), alpha);
}

extern "C" __global__ void __launch_bounds__(256)
    group_sums(const T* x, const T* dy, const P* scale, const P* bias, const ACC* mean, const ACC* variance, ACC* part,
               u32 images, u32 channels, u32 pixels, u32 per, u32 splits, u32 chunk, float epsilon, float alpha) {
    after_previous_launch();
    const u32 groups = channels / per;
#if LAST
    constexpr int TY = 256 / TX, PITCH = TX < 32 ? TX : TX + 4;  // of neighbours' channels: few share a bank
    __shared__ ACC scratch[2][TY][VEC * PITCH];
    const u32 tiles = (channels + TX * VEC - 1) / (TX * VEC), tile = blockIdx.x % tiles;
    const u32 split = blockIdx.x / tiles % splits, image = blockIdx.x / tiles / splits;
    const u32 tx = threadIdx.x % TX, ty = threadIdx.x / TX, c = (tile * TX + tx) * VEC;
    const u32 last = min((split + 1) * chunk, pixels);
    ACC s[VEC] = {}, t[VEC] = {};
    if (c < channels) {
        ACC m[VEC], a[VEC], b[VEC];
        const Vec<P, VEC> scales = of_channels(scale, c, 1), biases = of_channels(bias, c, 1);
        UNROLLED for (int j = 0; j < VEC; j++) {
            const u32 group = image * groups + (c + j) / per;
            m[j] = mean[group], a[j] = (ACC)widen(scales.at[j]) / sqrt(variance[group] + (ACC)epsilon);
            b[j] = widen(biases.at[j]);
        }
        const i64 base = (i64)image * pixels * channels + c;
        for (u32 n = split * chunk + ty; n < last; n += ROWS * TY) {
            Vec<T, VEC> v[ROWS], d[ROWS];
            UNROLLED for (int k = 0; k < ROWS; k++)
                if (n + k * TY < last) {
                    v[k] = load<VEC>(x + base + (i64)(n + k * TY) * channels);
                    d[k] = load<VEC>(dy + base + (i64)(n + k * TY) * channels);
                }
            UNROLLED for (int k = 0; k < ROWS; k++) {
                if (n + k * TY >= last) break;
                UNROLLED for (int j = 0; j < VEC; j++) {
                    const ACC centred = (ACC)widen(v[k].at[j]) - m[j];
                    const ACC dz = slope(d[k].at[j], centred, a[j], b[j], alpha);
                    s[j] += dz, t[j] += dz * centred;
                }
            }
        }
    }
    UNROLLED for (int j = 0; j < VEC; j++) scratch[0][ty][j * PITCH + tx] = s[j], scratch[1][ty][j * PITCH + tx] = t[j];
    __syncthreads();
    for (u32 k = threadIdx.x; k < 2 * TX * VEC; k += 256) {
        const u32 which = k / (TX * VEC), own = k % (TX * VEC), channel = tile * (TX * VEC) + own;
        if (channel >= channels) continue;
        ACC sum = 0;
        UNROLLED for (int i = 0; i < TY; i++) sum += scratch[which][i][own % VEC * PITCH + own / VEC];
        part[((i64)(image * 2 + which) * channels + channel) * splits + split] = sum;
    }
#else
    __shared__ ACC scratch[8];
    const u32 team = blockIdx.x * (256 / TEAM) + threadIdx.x / TEAM, split = team % splits, plane = team / splits;
    if (plane >= images * channels) return;  // whole teams
    const u32 image = plane / channels, c = plane % channels, group = image * groups + c / per;
    const u32 last = min((split + 1) * chunk, pixels / VEC);
    const ACC m = mean[group], a = (ACC)widen(scale[c]) / sqrt(variance[group] + (ACC)epsilon), b = widen(bias[c]);
    const i64 base = (i64)plane * pixels;
    ACC s = 0, t = 0;
    for (u32 n = split * chunk + threadIdx.x % TEAM; n < last; n += ROWS * TEAM) {
        Vec<T, VEC> v[ROWS], d[ROWS];
        UNROLLED for (int k = 0; k < ROWS; k++)
            if (n + k * TEAM < last) {
                v[k] = load<VEC>(x + base + (n + k * TEAM) * VEC);
                d[k] = load<VEC>(dy + base + (n + k * TEAM) * VEC);
            }
        UNROLLED for (int k = 0; k < ROWS; k++) {
            if (n + k * TEAM >= last) break;
            UNROLLED for (int j = 0; j < VEC; j++) {
                const ACC centred = (ACC)widen(v[k].at[j]) - m;
                const ACC dz = slope(d[k].at[j], centred, a, b, alpha);
                s += dz, t += dz * centred;
            }
        }
    }
    s = block_sum<TEAM>(s, scratch), t = block_sum<TEAM>(t, scratch);
    if (threadIdx.x % TEAM) return;
    part += ((i64)image * 2 * channels + c) * splits + split;
    part[0] = s, part[(i64)channels * splits] = t;
#endif
}

extern "C" __global__ void __launch_bounds__(256)
    group_params(const ACC* part, const P* scale, const ACC* variance, P* dscale, P* dbias, ACC* means, u32 images,
                 u32 channels, u32 pixels, u32 per, u32 splits, float epsilon) {
    after_previous_launch();
    const u32 groups = channels / per, teams = images * groups;
    const i64 next = (i64)channels * splits;  // from a channel's sum of dz to that of dz (x - mean)
    ACC s = 0, t = 0;
    if (blockIdx.x < teams) {
        __shared__ ACC scratch[8];
        const u32 first = blockIdx.x % groups * per;
        const ACC* from = part + ((i64)(blockIdx.x / groups) * 2 * channels + first) * splits;
#pragma unroll PARTS
        for (u32 k = threadIdx.x; k < per * splits; k += 256) {
            const ACC weight = widen(scale[first + k / splits]);
            s += weight * from[k], t += weight * from[k + next];
        }
        s = block_sum<256>(s, scratch), t = block_sum<256>(t, scratch);
        if (threadIdx.x) return;
        const ACC count = (ACC)per * pixels, padded = variance[blockIdx.x] + (ACC)epsilon, root = sqrt(padded);
        means[2 * blockIdx.x] = s / count / root;
        means[2 * blockIdx.x + 1] = t / count / padded / root;
        return;
    }
    const u32 c = (blockIdx.x - teams) * 8 + threadIdx.x / 32;
    if (c >= channels) return;
#pragma unroll PARTS
    for (u32 k = threadIdx.x % 32; k < images * splits; k += 32) {
        const u32 image = k / splits;
        const ACC* from = part + ((i64)image * 2 * channels + c) * splits + k % splits;
        s += from[0], t += from[next] / sqrt(variance[image * groups + c / per] + (ACC)epsilon);
    }
    s = warp_sum(s), t = warp_sum(t);
    if (threadIdx.x % 32) return;
    if (dbias) dbias[c] = narrow<P>(s);
    if (dscale) dscale[c] = narrow<P>(t);
}

extern "C" __global__ void __launch_bounds__(256, 2) group_dx(
    const T* x, const T* dy, const P* scale, const P* bias, const ACC* mean, const ACC* variance, const ACC* means,
    T* dx, u32 images, u32 channels, u32 pixels, u32 per, u32 splits, u32 chunk, float epsilon, float alpha) {
    after_previous_launch();
    const u32 groups = channels / per;
#if LAST
    const u32 across = channels / VEC, t = blockIdx.x * 256 + threadIdx.x, c = t % across * VEC;
    const u32 split = t / across % splits, image = t / across / splits;
    if (image >= images) return;
    ACC m[VEC], a[VEC], b[VEC], one[VEC], two[VEC];
    const Vec<P, VEC> scales = of_channels(scale, c, 1), biases = of_channels(bias, c, 1);
    UNROLLED for (int j = 0; j < VEC; j++) {
        const u32 group = image * groups + (c + j) / per;
        m[j] = mean[group], a[j] = (ACC)widen(scales.at[j]) / sqrt(variance[group] + (ACC)epsilon);
        b[j] = widen(biases.at[j]), one[j] = means[2 * group], two[j] = means[2 * group + 1];
    }
    const i64 base = (i64)image * pixels * channels + c;
    for (u32 n = split; n < pixels; n += DX_ROWS * splits) {
        Vec<T, VEC> v[DX_ROWS], d[DX_ROWS];
        UNROLLED for (int k = 0; k < DX_ROWS; k++)
            if (n + k * splits < pixels) {
                v[k] = load<VEC>(x + base + (i64)(n + k * splits) * channels);
                d[k] = load<VEC>(dy + base + (i64)(n + k * splits) * channels);
            }
        UNROLLED for (int k = 0; k < DX_ROWS; k++) {
            if (n + k * splits >= pixels) break;
            UNROLLED for (int j = 0; j < VEC; j++) {
                const ACC centred = (ACC)widen(v[k].at[j]) - m[j];
                const ACC dz = slope(d[k].at[j], centred, a[j], b[j], alpha);
                v[k].at[j] = narrow<T>(a[j] * dz - one[j] - centred * two[j]);
            }
            store<VEC>(dx + base + (i64)(n + k * splits) * channels, v[k]);
        }
    }
#else
    const u32 team = blockIdx.x * (256 / TEAM) + threadIdx.x / TEAM, split = team % splits, plane = team / splits;
    if (plane >= images * channels) return;
    const u32 image = plane / channels, c = plane % channels, group = image * groups + c / per;
    const u32 last = min((split + 1) * chunk, pixels / VEC);
    const ACC m = mean[group], a = (ACC)widen(scale[c]) / sqrt(variance[group] + (ACC)epsilon), b = widen(bias[c]);
    const ACC one = means[2 * group], two = means[2 * group + 1];
    const i64 base = (i64)plane * pixels;
    for (u32 n = split * chunk + threadIdx.x % TEAM; n < last; n += ROWS * TEAM) {
        Vec<T, VEC> v[ROWS], d[ROWS];
        UNROLLED for (int k = 0; k < ROWS; k++)
            if (n + k * TEAM < last) {
                v[k] = load<VEC>(x + base + (n + k * TEAM) * VEC);
                d[k] = load<VEC>(dy + base + (n + k * TEAM) * VEC);
            }
        UNROLLED for (int k = 0; k < ROWS; k++) {
            if (n + k * TEAM >= last) break;
            UNROLLED for (int j = 0; j < VEC; j++) {
                const ACC centred = (ACC)widen(v[k].at[j]) - m;
                const ACC dz = slope(d[k].at[j], centred, a, b, alpha);
                v[k].at[j] = narrow<T>(a * dz - one - centred * two);
            }
            store<VEC>(dx + base + (n + k * TEAM) * VEC, v[k]);
        }
    }
#endif
}
