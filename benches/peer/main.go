// Command peer does Lockstep's core job as a Go engineer would write it on controller-runtime: companions of labelled
// ConfigMaps in the namespaces that they name, healed, cleaned up, and guarded by a validating webhook. It is tuned (no
// client-side rate limit, caches that hold only what is labelled, no managedFields, parallel writes), so that
// `make bench` compares Lockstep with the best that is common.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"maps"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/config"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
)

const (
	domain   = "workshop.io/"
	managed  = domain + "managed"
	marked   = domain + "companion"
	origin   = domain + "source"
	bySource = "source"
)

type mirror struct {
	client     client.Client
	companions client.Reader
	recorder   events.EventRecorder
	writes     int
}

func main() {
	writes := flag.Int("writes", 64, "writes at a time")
	certs := flag.String("cert-dir", "", "directory with tls.crt and tls.key; serves the webhook if set")
	port := flag.Int("webhook-port", 9443, "port of the webhook")
	ops := flag.String("metrics-bind", "0", "address of the metrics")
	probes := flag.String("health-bind", "0", "address of /readyz")
	flag.Parse()
	ctrl.SetLogger(zap.New(zap.UseDevMode(false)))
	if err := run(*writes, *certs, *port, *ops, *probes); err != nil {
		ctrl.Log.Error(err, "the peer ends")
		os.Exit(1)
	}
}

func run(writes int, certs string, port int, ops, probes string) error {
	rest, err := config.GetConfig()
	if err != nil {
		return err
	}
	// No client-side rate limit.
	rest.QPS, rest.Burst = -1, -1
	labelled := func(key string, values ...string) cache.ByObject {
		operator := selection.Exists
		if len(values) > 0 {
			operator = selection.In
		}
		requirement, err := labels.NewRequirement(key, operator, values)
		if err != nil {
			panic(err)
		}
		return cache.ByObject{Label: labels.NewSelector().Add(*requirement)}
	}
	strip := cache.TransformStripManagedFields()
	manager, err := ctrl.NewManager(rest, ctrl.Options{
		Metrics:                server.Options{BindAddress: ops},
		HealthProbeBindAddress: probes,
		WebhookServer:          webhook.NewServer(webhook.Options{CertDir: certs, Port: port}),
		Cache: cache.Options{
			DefaultTransform: strip,
			ByObject:         map[client.Object]cache.ByObject{&corev1.ConfigMap{}: labelled(managed, "true")},
		},
	})
	if err != nil {
		return err
	}
	// One cache has one selector for each kind: companions are in a second one.
	companions, err := cache.New(rest, cache.Options{
		Scheme:           manager.GetScheme(),
		Mapper:           manager.GetRESTMapper(),
		DefaultTransform: strip,
		ByObject:         map[client.Object]cache.ByObject{&corev1.ConfigMap{}: labelled(marked)},
	})
	if err != nil {
		return err
	}
	if err := manager.Add(companions); err != nil {
		return err
	}
	ctx := ctrl.SetupSignalHandler()
	index := func(object client.Object) []string {
		if named := object.GetAnnotations()[origin]; named != "" {
			return []string{named}
		}
		return nil
	}
	if err := companions.IndexField(ctx, &corev1.ConfigMap{}, bySource, index); err != nil {
		return err
	}
	m := &mirror{
		client:     manager.GetClient(),
		companions: companions,
		recorder:   manager.GetEventRecorder("peer"),
		writes:     writes,
	}
	toSource := handler.TypedEnqueueRequestsFromMapFunc(
		func(_ context.Context, object *corev1.ConfigMap) []reconcile.Request {
			namespace, name, found := strings.Cut(object.Annotations[origin], "/")
			if !found {
				return nil
			}
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}}}
		})
	everySource := handler.EnqueueRequestsFromMapFunc(m.sourcesWithPatterns)
	err = ctrl.NewControllerManagedBy(manager).
		For(&corev1.ConfigMap{}).
		Watches(&corev1.Namespace{}, everySource).
		WatchesRawSource(source.Kind(companions, &corev1.ConfigMap{}, toSource)).
		WithOptions(controller.Options{MaxConcurrentReconciles: writes}).
		Complete(m)
	if err != nil {
		return err
	}
	if certs != "" {
		decoder := admission.NewDecoder(manager.GetScheme())
		manager.GetWebhookServer().Register("/validate", &webhook.Admission{Handler: &guard{decoder}})
	}
	if err := manager.AddReadyzCheck("synced", func(request *http.Request) error {
		if !companions.WaitForCacheSync(request.Context()) || !manager.GetCache().WaitForCacheSync(request.Context()) {
			return http.ErrServerClosed
		}
		return nil
	}); err != nil {
		return err
	}
	return manager.Start(ctx)
}

// sourcesWithPatterns returns the sources that a new or changed namespace may concern.
func (m *mirror) sourcesWithPatterns(ctx context.Context, namespace client.Object) []reconcile.Request {
	var sources corev1.ConfigMapList
	if err := m.client.List(ctx, &sources); err != nil {
		return nil
	}
	var requests []reconcile.Request
	for i := range sources.Items {
		if wants(&sources.Items[i], namespace.GetName()) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&sources.Items[i])})
		}
	}
	return requests
}

func (m *mirror) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	var have corev1.ConfigMapList
	if err := m.companions.List(ctx, &have, client.MatchingFields{bySource: request.String()}); err != nil {
		return reconcile.Result{}, err
	}
	known := make(map[string]*corev1.ConfigMap, len(have.Items))
	for i := range have.Items {
		known[have.Items[i].Namespace+"/"+have.Items[i].Name] = &have.Items[i]
	}
	var from corev1.ConfigMap
	err := m.client.Get(ctx, request.NamespacedName, &from)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, err
	}
	var tasks errgroup.Group
	tasks.SetLimit(m.writes)
	if err == nil && from.DeletionTimestamp.IsZero() {
		namespaces, err := m.targets(ctx, &from)
		if err != nil {
			return reconcile.Result{}, err
		}
		written := 0
		for _, namespace := range namespaces {
			want := companion(&from, namespace)
			found := known[want.Namespace+"/"+want.Name]
			delete(known, want.Namespace+"/"+want.Name)
			if found != nil && same(found, want) {
				continue
			}
			written++
			tasks.Go(func() error { return m.write(ctx, found, want) })
		}
		if written > 0 {
			defer m.recorder.Eventf(&from, nil, corev1.EventTypeNormal, "Mirrored", "Mirror", "%d companions", written)
		}
	}
	for _, orphan := range known {
		tasks.Go(func() error {
			preconditions := client.Preconditions{UID: &orphan.UID, ResourceVersion: &orphan.ResourceVersion}
			return client.IgnoreNotFound(m.client.Delete(ctx, orphan, preconditions))
		})
	}
	return reconcile.Result{}, tasks.Wait()
}

func (m *mirror) write(ctx context.Context, found, want *corev1.ConfigMap) error {
	if found == nil {
		err := m.client.Create(ctx, want)
		if apierrors.IsAlreadyExists(err) {
			// A foreign object, or our own that the cache does not show yet: another event follows.
			return nil
		}
		return err
	}
	changed := found.DeepCopy()
	changed.Data, changed.BinaryData = want.Data, want.BinaryData
	if changed.Labels == nil {
		changed.Labels = map[string]string{}
	}
	if changed.Annotations == nil {
		changed.Annotations = map[string]string{}
	}
	maps.Copy(changed.Labels, want.Labels)
	maps.Copy(changed.Annotations, want.Annotations)
	changed.OwnerReferences, changed.Finalizers = want.OwnerReferences, nil
	return m.client.Update(ctx, changed)
}

func (m *mirror) targets(ctx context.Context, from *corev1.ConfigMap) ([]string, error) {
	var all corev1.NamespaceList
	if err := m.client.List(ctx, &all); err != nil {
		return nil, err
	}
	var names []string
	for i := range all.Items {
		if all.Items[i].DeletionTimestamp.IsZero() && wants(from, all.Items[i].Name) {
			names = append(names, all.Items[i].Name)
		}
	}
	return names, nil
}

func wants(from *corev1.ConfigMap, namespace string) bool {
	list := from.Annotations[domain+"target-namespaces"]
	if list == "" {
		return namespace == from.Namespace
	}
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimSpace(item)
		if item == "." {
			item = from.Namespace
		}
		if matched, err := path.Match(item, namespace); err == nil && matched {
			return true
		}
	}
	return false
}

// companion has the same marks as Lockstep's, so that both write objects of the same size.
func companion(from *corev1.ConfigMap, namespace string) *corev1.ConfigMap {
	want := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace,
			Name:      from.Name + "-synced",
			Labels: map[string]string{
				marked:                      "true",
				domain + "source-namespace": from.Namespace,
				domain + "source-name":      from.Name,
			},
			Annotations: map[string]string{
				origin:                     from.Namespace + "/" + from.Name,
				domain + "source-uid":      string(from.UID),
				domain + "source-checksum": checksum(from),
				domain + "protect":         "edits",
			},
		},
		Data:       from.Data,
		BinaryData: from.BinaryData,
	}
	if namespace == from.Namespace {
		yes := true
		want.OwnerReferences = []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "ConfigMap", Name: from.Name, UID: from.UID, Controller: &yes},
		}
	}
	return want
}

func checksum(from *corev1.ConfigMap) string {
	// Maps are encoded in the order of their keys.
	encoded, _ := json.Marshal([]any{from.Data, from.BinaryData})
	sum := sha256.Sum256(encoded)
	return hex.EncodeToString(sum[:6])
}

func same(found, want *corev1.ConfigMap) bool {
	within := func(want, found map[string]string) bool {
		for key, value := range want {
			if found[key] != value {
				return false
			}
		}
		return true
	}
	sameOwner := func(a, b metav1.OwnerReference) bool { return a.UID == b.UID && a.Name == b.Name }
	return maps.Equal(found.Data, want.Data) &&
		maps.EqualFunc(found.BinaryData, want.BinaryData, slices.Equal[[]byte]) &&
		within(want.Labels, found.Labels) && within(want.Annotations, found.Annotations) &&
		slices.EqualFunc(found.OwnerReferences, want.OwnerReferences, sameOwner) && len(found.Finalizers) == 0
}

// guard refuses edits of companions by anybody but the mirror, and sources with a malformed annotation.
type guard struct{ decoder admission.Decoder }

func (g *guard) Handle(_ context.Context, request admission.Request) admission.Response {
	if strings.HasPrefix(request.UserInfo.Username, "system:serviceaccount:lockstep-system:") {
		return admission.Allowed("")
	}
	var object, old corev1.ConfigMap
	if len(request.Object.Raw) > 0 {
		if err := g.decoder.DecodeRaw(request.Object, &object); err != nil {
			return admission.Errored(http.StatusBadRequest, err)
		}
	}
	if len(request.OldObject.Raw) > 0 {
		if err := g.decoder.DecodeRaw(request.OldObject, &old); err != nil {
			return admission.Errored(http.StatusBadRequest, err)
		}
	}
	if named := old.Annotations[origin]; old.Labels[marked] == "true" && request.Operation != "DELETE" {
		return admission.Denied("this is a companion of " + named + ": change that instead")
	}
	for item := range strings.SplitSeq(object.Annotations[domain+"target-namespaces"], ",") {
		if _, err := path.Match(strings.TrimSpace(item), ""); err != nil {
			return admission.Denied("target-namespaces: " + err.Error())
		}
	}
	return admission.Allowed("")
}
